"""PPO with a critic against a plain PyTorch loop: real DeepSpeed over gloo, one and two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from openrlhf.trainer.experience import Budget
from tests.integration import critic_twin, rl_twin
from tests.integration.backend_worker import run_ranks
from tests.tiny_models import make_tiny_model

RUNS = [(stage, Budget(2, None)) for stage in (0, 1, 2, 3)] + [(2, Budget(None, 24)), (2, Budget(1, None))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("critic")
    actor = make_tiny_model(root / "actor", "qwen2")
    torch.manual_seed(3)
    critic = AutoModelForSequenceClassification.from_pretrained(actor, num_labels=1)
    critic.save_pretrained(root / "critic")
    return actor, root / "critic"


def _compare(folders: tuple[Path, Path], expected: dict[str, Any]) -> None:
    for stage, budget in RUNS:
        found = critic_twin.product_run(*folders, stage, budget)
        for role, wanted in expected.items():
            what = (role, stage, budget)
            for name in ("losses", "norms"):
                assert found[role][name] == pytest.approx(wanted[name], rel=2e-6, abs=2e-6), (what, name)
            assert sorted(found[role]["weights"]) == sorted(wanted["weights"])
            gap = max(float((found[role]["weights"][n] - w).abs().max()) for n, w in wanted["weights"].items())
            assert gap <= 1e-6, (what, gap)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ppo_with_a_critic_takes_the_steps_of_a_plain_pytorch_loop(folders: tuple[Path, Path], ranks: int) -> None:
    plain = critic_twin.plain_run(*folders)
    assert max(plain["actor"]["norms"]) > rl_twin.MAX_NORM and max(plain["critic"]["norms"]) > 0.1
    run_ranks(_compare, ranks, folders, plain)
