"""Weights that a group of ranks holds a second time (ZeRO++), and states that leave and come back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from openrlhf.backends.residence import leave_accelerator, return_to
from openrlhf.config import MuonConfig
from tests.integration import backend_worker as worker
from tests.tiny_models import make_tiny_model

MUON = replace(worker.OPTIMIZER, optim="muon", muon=MuonConfig(lr=0.01))


def _ask(backend: Any) -> torch.Tensor:
    with torch.no_grad():
        return backend.forward(worker.micro_batches(9)[0]).logprobs


def _train_ask_save_and_resume(model: Path, folder: Path) -> list[dict[str, Any]]:
    """The same with and without a second shard group. Returns: what each of the two did."""
    found = []
    for zpg in (1, 2):
        options = {"dtype": "bf16", "zpg": zpg, "total_steps": 4}
        backend = worker.make_backend(model, 3, **options)
        asked = [_ask(backend)]
        for step in range(2):
            worker.train_with_backend(backend, range(step, step + 1))
            asked.append(_ask(backend))
        backend.save_checkpoint(folder / f"state{zpg}", {"step": 2})
        backend.save_hf(folder / f"model{zpg}")
        torch.distributed.barrier()
        saved = load_file(folder / f"model{zpg}" / "model.safetensors")
        again = worker.make_backend(model, 3, **options)
        assert again.load_checkpoint(folder / f"state{zpg}") == {"step": 2}
        asked.append(_ask(again))
        assert torch.equal(asked[-1], asked[-2])
        trace = worker.train_with_backend(again, range(2, 4))
        found.append({"asked": asked, "saved": saved, "trace": trace, "weights": worker.full_weights(again)})
    return found


def test_a_second_shard_group_changes_no_number_in_training_asking_saving_or_resuming(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    for plain, grouped in worker.run_ranks(_train_ask_save_and_resume, 2, model, tmp_path):
        assert all(torch.equal(a, b) for a, b in zip(plain["asked"], grouped["asked"], strict=True))
        assert not torch.equal(plain["asked"][0], plain["asked"][2])
        assert plain["trace"] == grouped["trace"]
        for kind in ("saved", "weights"):
            assert plain[kind] and all(torch.equal(plain[kind][name], grouped[kind][name]) for name in plain[kind])


def _sleep_between_steps(model: Path) -> list[tuple[Any, Any]]:
    """On a CPU nothing moves, but every call into DeepSpeed is made, and has to leave it as it was; what is moved by us
    gives up its memory there too.
    """
    found = []
    half: dict[str, Any] = {"dtype": "bf16"}
    cases: list[tuple[int, dict[str, Any]]] = [
        *((0, half), (1, half), (1, {**half, "optimizer": MUON}), (2, half)),
        *((1, {}), (2, {}), (3, {}), (3, {"adam_offload": True}), (3, {"optimizer": MUON})),
    ]
    for stage, options in cases:
        awake, sleeper = (worker.make_backend(model, stage, **options) for _ in range(2))
        expected, slept = [], []
        for step in range(worker.STEPS):
            expected.append(worker.train_with_backend(awake, range(step, step + 1)))
            slept.append(worker.train_with_backend(sleeper, range(step, step + 1)))
            parked = leave_accelerator(sleeper.module, sleeper.model, plain=False)
            if stage < 2 and options.get("dtype") == "bf16":
                assert {p.untyped_storage().nbytes() for p in sleeper.module.parameters()} == {0}
            return_to(torch.device("cpu"), sleeper.module, sleeper.model, parked, plain=False)
        found.append((expected, slept))
    return found


def test_a_model_whose_states_left_and_came_back_takes_the_steps_of_one_that_stayed(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    for results in worker.run_ranks(_sleep_between_steps, 2, model):
        for expected, slept in results:
            assert slept == expected
