"""The RL update on recorded rollouts against a plain PyTorch loop: real DeepSpeed over gloo, one and two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from openrlhf.trainer.experience import Budget
from tests.integration import rl_twin as twin
from tests.integration.backend_worker import run_ranks
from tests.tiny_models import make_tiny_model

CASES = [
    twin.Case("reinforce_baseline", None),
    twin.Case("reinforce", None, gamma=0.9),
    twin.Case("group_norm", "k3"),
    twin.Case("dr_grpo", "k2", aggregation="constant"),
    twin.Case("rloo", "k2", aggregation="seq_mean"),
]
BUDGETS = [Budget(2, None), Budget(None, 24), Budget(64, None), Budget(1, None)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("twin") / "model", "qwen2")


def _compare(model: Path, runs: list[tuple[twin.Case, int, Budget]], expected: list[dict[str, Any]]) -> None:
    for (case, stage, budget), wanted in zip(runs, expected, strict=True):
        found = twin.product_run(model, case, stage, budget)
        what = (case, stage, budget)
        for name in ("losses", "norms", "rates"):
            assert found[name] == pytest.approx(wanted[name], rel=1e-6, abs=1e-6), (what, name)
        assert sorted(found["weights"]) == sorted(wanted["weights"])
        gap = max(float((found["weights"][n] - w).abs().max()) for n, w in wanted["weights"].items())
        assert gap <= 1e-6, (what, gap)
        # The first update of a rollout is made by the policy that sampled it.
        assert found["ratios"][0] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_estimator_stage_and_micro_batch_takes_the_steps_of_a_plain_pytorch_loop(model: Path, ranks: int) -> None:
    plain = {case: twin.plain_run(model, case) for case in CASES}
    assert all(max(result["norms"]) > twin.MAX_NORM for result in plain.values()), "the clip has to be active"
    main = CASES[0]
    runs = [(main, stage, BUDGETS[0]) for stage in (0, 1, 2, 3)] + [(main, 2, budget) for budget in BUDGETS[1:]]
    runs += [(case, 2, BUDGETS[0]) for case in CASES[1:]]
    run_ranks(_compare, ranks, model, runs, [_detached(plain[case]) for case, _, _ in runs])


def _detached(result: dict[str, Any]) -> dict[str, Any]:
    return {**result, "weights": {name: weight.detach() for name, weight in result["weights"].items()}}


ONE_UPDATE = [
    (twin.Case("reinforce_baseline", None), "ppo"),
    (twin.Case("group_norm", "k3"), "ppo"),
    (twin.Case("rloo", "k2", aggregation="seq_mean"), "gspo"),
    (twin.Case("dr_grpo", "k3", aggregation="constant"), "cispo"),
]


def _with_and_without_the_pass(model: Path) -> None:
    for case, loss in ONE_UPDATE:
        scored, skipped = (twin.one_update_run(model, case, loss, scored=scored) for scored in (True, False))
        for name in ("losses", "norms", "sums"):
            assert skipped[name] == scored[name], (case, loss, name)
        assert all(torch.equal(weight, scored["weights"][name]) for name, weight in skipped["weights"].items())
        assert all(sums["ppo_kl"] == 0 for sums in skipped["sums"])
        if case.kl_in_loss:
            assert skipped["kls"] == pytest.approx(scored["kls"], rel=1e-6) and skipped["kls"][1] > 0
        else:
            assert skipped["kls"] == scored["kls"] == [None, None]


def test_one_update_a_rollout_without_the_pass_for_old_log_probs_is_the_same_to_the_last_bit(model: Path) -> None:
    run_ranks(_with_and_without_the_pass, 1, model)
