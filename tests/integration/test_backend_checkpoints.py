"""Checkpoints: a resumed run goes on bit for bit, and a failure to write costs nothing that was there before."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from openrlhf.backends.checkpoints import CheckpointStore
from openrlhf.config import ConfigError
from tests.integration import backend_worker as worker
from tests.tiny_models import make_tiny_model

STAGES = (("fp32", 0), ("fp32", 1), ("fp32", 2), ("fp32", 3), ("bf16", 1), ("bf16", 2), ("bf16", 3))


def _draws() -> tuple[float, ...]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def _assert_bit_for_bit(found: dict[str, Any], expected: dict[str, Any], case: str) -> None:
    assert found["trace"] == expected["trace"], case
    assert found["draws"] == expected["draws"], case
    for name, tensor in expected["weights"].items():
        assert torch.equal(found["weights"][name], tensor), f"{case}: {name}"


def _finish(backend: Any) -> dict[str, Any]:
    return {
        "trace": worker.train_with_backend(backend, range(2, 4)),
        "draws": _draws(),
        "weights": worker.full_weights(backend),
    }


def _stop_and_resume(model: Path, folder: Path) -> None:
    for dtype, stage in STAGES:
        case = f"{dtype}, stage {stage}"
        target = folder / f"{dtype}-{stage}"
        first = worker.make_backend(model, stage, dtype=dtype, total_steps=4, seed=7)
        worker.train_with_backend(first, range(2))
        # Each rank draws differently, so that a rank which got another's random state is found out.
        random.seed(first.rank)
        torch.manual_seed(100 + first.rank)
        numpy.random.seed(first.rank)
        state = {"sampler": {"epoch": 1, "position": 12}, "step": 2}
        first.save_checkpoint(target, state)
        expected = _finish(first)

        second = worker.make_backend(model, stage, dtype=dtype, total_steps=4, seed=8)
        assert second.load_checkpoint(target) == state, case
        assert len(second.unmoved_parameters()) == len(list(second.module.named_parameters()))
        _assert_bit_for_bit(_finish(second), expected, case)
        assert second.unmoved_parameters() == [], case


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_goes_on_bit_for_bit_on_every_stage(tmp_path: Path, ranks: int) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    worker.run_ranks(_stop_and_resume, ranks, model, tmp_path / "checkpoints")


def _fail_to_save(model: Path, folder: Path, limit: int, failing: tuple[int, ...]) -> list[str]:
    """Saves well once, then with a disk that is full for some ranks. Returns: what was said the second time."""
    from openrlhf.backends.distributed import RankError

    messages = []
    for stage in (0, 2, 3):
        target = folder / f"{stage}-{failing}"
        backend = worker.make_backend(model, stage)
        worker.train_with_backend(backend, range(1))
        backend.save_checkpoint(target, {"step": 1})
        kept = worker.full_weights(backend)
        worker.train_with_backend(backend, range(1, 2))
        with worker.small_disk(limit, only=backend.rank in failing), pytest.raises(RankError) as caught:
            backend.save_checkpoint(target, {"step": 2})
        messages.append(str(caught.value))
        again = worker.make_backend(model, stage)
        assert again.load_checkpoint(target) == {"step": 1}
        for name, tensor in worker.full_weights(again).items():
            assert torch.equal(tensor, kept[name]), f"stage {stage}: {name}"
    return messages


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
def test_a_full_disk_stops_every_rank_with_one_sentence_and_the_checkpoint_of_before_survives(
    tmp_path: Path, failing: tuple[int, ...]
) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    for messages in worker.run_ranks(_fail_to_save, 2, model, tmp_path / "checkpoints", 3_000, failing):
        for message in messages:
            assert "writing the checkpoint" in message and f"failed on rank {failing[0]}" in message
            assert "\n" not in message
    assert not list((tmp_path / "checkpoints").glob("*.partial"))


def _load(model: Path, folder: Path, stage: int = 2, dtype: str = "fp32") -> str:
    from openrlhf.backends.distributed import RankError

    backend = worker.make_backend(model, stage, dtype=dtype)
    with pytest.raises((ConfigError, RankError)) as caught:
        backend.load_checkpoint(folder)
    return f"{caught.type.__name__}: {caught.value}"


def _save(model: Path, folder: Path, state: dict[str, Any]) -> None:
    worker.make_backend(model, 2).save_checkpoint(folder, state)


def test_a_checkpoint_that_is_missing_incomplete_or_of_another_layout_is_refused_by_name(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    folder = tmp_path / "global_step5"
    worker.run_ranks(_save, 1, model, folder, {})
    for message in worker.run_ranks(_load, 2, model, folder):
        # RB67 for a whole run: ZeRO's state belongs to its number of ranks.
        assert message.startswith(
            f"ConfigError: the checkpoint {folder} was written by 1 rank and this run has 2 ranks"
        )
        assert "resume on 1, or start anew from an exported model" in message
    (message,) = worker.run_ranks(_load, 1, model, folder, 3)
    assert "ConfigError" in message and "ZeRO stage 2 and this run has 3" in message and "--ds flags" in message
    (message,) = worker.run_ranks(_load, 1, model, folder, 2, "bf16")
    assert "ConfigError" in message and "dtype float32 and this run has bfloat16" in message
    (folder / "complete").unlink()
    assert f"RankError: loading the checkpoint {folder} failed" in worker.run_ranks(_load, 1, model, folder)[0]
    assert "is not a complete checkpoint" in worker.run_ranks(_load, 1, model, tmp_path / "nowhere")[0]


class _Harm:
    """Pickled into a file, it makes whoever unpickles it write another file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def _load_harm(model: Path, folder: Path) -> None:
    backend = worker.make_backend(model, 2)
    backend.save_checkpoint(folder, {})
    file = folder / "rng_rank0.pt"
    assert set(torch.load(file, weights_only=True)) == {"python", "numpy", "torch"}
    torch.save({"python": _Harm(folder / "trace")}, file)
    with pytest.raises(pickle.UnpicklingError):
        backend.load_checkpoint(folder)
    assert not (folder / "trace").exists()


def test_a_random_state_holds_numbers_alone_and_one_that_holds_code_is_not_run(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    worker.run_ranks(_load_harm, 1, model, tmp_path / "global_step1")


def _resume_after_kill(model: Path, root: Path) -> None:
    backend = worker.make_backend(model, 2)
    backend.save_checkpoint(root / "global_step2", {"step": 2})
    # As a kill between the two renames of a second save of the same step leaves it, and one in another save.
    (root / "global_step2").rename(root / "global_step2.old")
    for name in ("global_step2.partial", "global_step4.partial"):
        (root / name).mkdir()
    store = CheckpointStore(root, max_num=3, max_mem_gb=1)
    assert backend.load_checkpoint(store.latest()) == {"step": 2}
    backend.save_checkpoint(root / "global_step3", {"step": 3})
    assert sorted(path.name for path in root.iterdir()) == ["global_step2", "global_step3"]
    assert backend.load_checkpoint(root / "global_step2") == {"step": 2}


def test_what_a_kill_left_between_two_renames_is_resumed_from_and_swept_by_the_next_save(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    worker.run_ranks(_resume_after_kill, 1, model, tmp_path / "states")
