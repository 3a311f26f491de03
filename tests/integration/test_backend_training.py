"""The DeepSpeed backend against a plain PyTorch loop: ZeRO 0 to 3, one and two ranks, real processes over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from openrlhf.backends.base import StepResult
from openrlhf.backends.movement import ZERO_GRADIENT, MovementWatch
from openrlhf.config import ConfigError
from tests.integration import backend_worker as worker
from tests.tiny_models import make_tiny_model

STEPS = range(worker.STEPS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": make_tiny_model(folder / "tied", "qwen2", tie=True),
        "untied": make_tiny_model(folder / "untied", "qwen3", tie=False),
    }


def _assert_same(found: dict[str, Any], expected: dict[str, Any], weights: dict[str, torch.Tensor], case: str) -> None:
    for key in ("losses", "norms"):
        assert found[key] == pytest.approx(expected[key], rel=1e-6, abs=1e-6), f"{case}: {key}"
    assert found["rates"] == pytest.approx(expected["rates"], rel=1e-12)
    assert sorted(weights) == sorted(expected["weights"]), case
    for name, tensor in weights.items():
        assert (tensor - expected["weights"][name]).abs().max() <= 1e-6, f"{case}: {name}"


def _train_every_way(folders: dict[str, Path], expected: dict[str, dict[str, Any]]) -> None:
    cases: list[tuple[str, int, dict[str, Any]]] = [
        *((kind, stage, {}) for kind in folders for stage in (0, 1, 2, 3)),
        ("tied", 2, {"packing_samples": False}),
        ("untied", 3, {"packing_samples": False}),
        ("tied", 3, {"gradient_checkpointing": True}),
        ("untied", 2, {"gradient_checkpointing": True, "gradient_checkpointing_reentrant": True}),
        ("untied", 3, {"gradient_checkpointing": True, "gradient_checkpointing_reentrant": True}),
        ("tied", 2, {"attn_implementation": "sdpa"}),
        ("untied", 2, {"torch_compile": True, "gradient_checkpointing": True}),
        ("tied", 2, {"one_batch": True}),
        ("untied", 3, {"one_batch": True}),
        *(("tied", stage, {"adam_offload": True}) for stage in (1, 2, 3)),
        ("tied", 2, {"overlap_comm": True}),
        ("untied", 2, {"overlap_comm": True, "one_batch": True}),
        # Groups of one rank would be none.
        *([("tied", 3, {"zpg": 2})] if torch.distributed.get_world_size() > 1 else []),
    ]
    for kind, stage, options in cases:
        one_batch = options.pop("one_batch", False)
        backend = worker.make_backend(folders[kind], stage, **options)
        assert backend.plan.packed == options.get("packing_samples", True)
        assert backend.plan.in_head
        assert len(backend.unmoved_parameters()) == len(list(backend.module.named_parameters()))
        found = worker.train_with_backend(backend, STEPS, one_batch=one_batch)
        case = f"{kind}, stage {stage}, {options}, one batch {one_batch}"
        _assert_same(found, expected[kind], worker.full_weights(backend), case)
        assert backend.unmoved_parameters() == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_zero_stage_takes_the_steps_of_a_plain_pytorch_loop(models: dict[str, Path], ranks: int) -> None:
    expected = {kind: worker.plain_training(folder) for kind, folder in models.items()}
    assert all(norm > 0.5 for norm in expected["tied"]["norms"]), "the clip has to be active"
    worker.run_ranks(_train_every_way, ranks, models, expected)


def _train_in_bf16(folder: Path, expected: dict[str, Any]) -> None:
    cases = [*((stage, {}) for stage in (0, 1, 2, 3)), *((stage, {"adam_offload": True}) for stage in (1, 2, 3))]
    for stage, options in [*cases, (2, {"overlap_comm": True})]:
        backend = worker.make_backend(folder, stage, dtype="bf16", **options)
        assert backend.stage == max(stage, 1)
        # ZeRO-3 would round rotary frequencies to bf16 while it loads.
        assert {buffer.dtype for buffer in backend.module.buffers()} == {torch.float32}
        found = worker.train_with_backend(backend, STEPS)
        # Gradients of ranks are added up in bf16, and stage 1 rounds them to it even for one rank.
        exact = backend.world_size == 1 and stage >= 2
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6 if exact else 1e-3)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-6 if exact else 1e-2)
        for name, tensor in worker.full_weights(backend).items():
            assert tensor.dtype == torch.bfloat16
            difference = (tensor.float() - expected["weights"][name].float()).abs().max()
            assert difference <= (0 if exact else 2 * worker.LR), f"stage {stage}, {options}: {name}"
        assert backend.unmoved_parameters() == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_bf16_training_keeps_float32_masters_and_adds_gradients_up_in_float32(
    models: dict[str, Path], ranks: int
) -> None:
    expected = worker.mixed_precision_training(models["tied"])
    worker.run_ranks(_train_in_bf16, ranks, models["tied"], expected)


def _add_up_in_bf16(folder: Path, expected: dict[str, Any]) -> None:
    for stage in (1, 2, 3):
        weights = {}
        for accumulate in (None, "bf16"):
            backend = worker.make_backend(folder, stage, dtype="bf16", grad_accum_dtype=accumulate)
            found = worker.train_with_backend(backend, STEPS)
            weights[accumulate] = worker.full_weights(backend)
        # Only where there is one rank and one order of rounding.
        exact = backend.world_size == 1 and stage >= 2
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-6 if exact else 1e-2), f"stage {stage}"
        for name, tensor in weights["bf16"].items():
            difference = (tensor.float() - expected["weights"][name].float()).abs().max()
            assert difference <= (0 if exact else 2 * worker.LR), f"stage {stage}: {name}"
        assert any(not torch.equal(tensor, weights["bf16"][name]) for name, tensor in weights[None].items())


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_of_micro_batches_are_added_up_in_bf16_only_where_that_is_asked_for(
    models: dict[str, Path], ranks: int
) -> None:
    expected = worker.mixed_precision_training(models["tied"], accumulate=torch.bfloat16)
    worker.run_ranks(_add_up_in_bf16, ranks, models["tied"], expected)


def _stand_still(folder: Path) -> list[str]:
    """Trains with two weights to which no gradient comes. Returns: what is said after each step, by stage."""
    said = []
    for stage in (0, 2, 3):
        # Decay would move a matrix without any gradient.
        optimizer = replace(
            worker.OPTIMIZER, adam=replace(worker.OPTIMIZER.adam, weight_decay=0.0), lr_warmup_ratio=0.3
        )
        healthy = worker.make_backend(folder, stage, optimizer=optimizer)
        stuck = worker.make_backend(folder, stage, optimizer=optimizer)
        for name in ("model.norm.weight", "model.layers.1.self_attn.q_proj.weight"):
            stuck.module.get_parameter(name).register_hook(torch.zeros_like)
        assert stuck.movement_warning() is None
        for step in STEPS:
            worker.train_with_backend(healthy, range(step, step + 1))
            assert healthy.movement_warning() is None
            worker.train_with_backend(stuck, range(step, step + 1))
            said.append(stuck.movement_warning())
    return said


def test_weights_that_stand_still_are_named_once_after_the_first_step_that_could_move_them(
    models: dict[str, Path],
) -> None:
    # RB73
    for said in worker.run_ranks(_stand_still, 2, models["tied"]):
        # The first step of a warm-up has a rate of 0.
        assert [message is not None for message in said] == [False, True, False] * 3
        for message in filter(None, said):
            assert message.startswith("2 of 26 trainable weights have not moved, at a learning rate of 0.001: ")
            assert "model.norm.weight" in message and "model.layers.1.self_attn.q_proj.weight" in message


def _watch(rates: list[float], skipped: tuple[int, ...] = ()) -> list[bool]:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    watch = MovementWatch(model, torch.device("cpu"))
    steps = [StepResult(1.0, number in skipped, rate) for number, rate in enumerate(rates)]
    said = [watch.warning(step) for step in steps]
    for message in filter(None, said):
        assert "8 of 8 trainable weights" in message
        assert message.count(".weight") + message.count(".bias") == 5 and "and 3 more" in message
    return [message is not None for message in said]


def test_a_rate_that_still_rises_from_nearly_nothing_blames_no_weight_yet() -> None:
    (said,) = worker.run_ranks(_watch, 1, [0.0, 1e-9, 2e-9, 1e-6, 1e-6])
    assert said == [False, False, False, True, False]
    (said,) = worker.run_ranks(_watch, 1, [0.0, 1e-9, 1e-9, 1e-9])
    assert said == [False, False, True, False]
    (said,) = worker.run_ranks(_watch, 1, [1.0, 1.0, 1.0], (0,))
    assert said == [False, True, False]


def _zero_gradients() -> list[str | None]:
    watch = MovementWatch(torch.nn.Linear(2, 2), torch.device("cpu"))
    return [watch.warning(StepResult(norm, False, 1.0)) for norm in (0.0, 0.0, 1.0, 0.0)]


def test_a_step_without_any_gradient_is_told_once_and_judges_no_weight() -> None:
    (said,) = worker.run_ranks(_zero_gradients, 1)
    assert said[0] == ZERO_GRADIENT and said[1] is None and said[3] is None
    assert said[2].startswith("2 of 2 trainable weights have not moved")


def _waits_for_the_device(folder: Path) -> list[int]:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    seen: list[str] = []
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "synchronize", lambda *args: seen.append("wait"))
        for stage in (1, 2, 3):
            backend = worker.make_backend(folder, stage, dtype="bf16", total_steps=4)
            # DeepSpeed's clock runs from the third step on.
            worker.train_with_backend(backend, range(3))
            seen.clear()
            for batch in worker.micro_batches(3)[:2]:
                backend.backward(worker.token_loss(backend.forward(batch).logprobs, batch, 1))
            counts.append(len(seen))
    return counts


def test_a_micro_batch_is_queued_before_the_device_is_done_with_the_one_before(models: dict[str, Path]) -> None:
    assert worker.run_ranks(_waits_for_the_device, 1, models["tied"]) == [[0, 0, 0]]


def _gradients_kept(folder: Path) -> tuple[int, float]:
    backend = worker.make_backend(folder, 1, dtype="bf16")
    batch = worker.micro_batches(0)[0]
    backend.backward(worker.token_loss(backend.forward(batch).logprobs, batch, 1))
    kept = sum(parameter.grad is not None for parameter in backend.module.parameters())
    return kept, sum(float(sums.abs().sum()) for sums in backend._engine.optimizer.fp32_groups_gradients_flat)


def test_stage_1_keeps_no_gradients_beside_their_sums_in_float32(models: dict[str, Path]) -> None:
    ((kept, summed),) = worker.run_ranks(_gradients_kept, 1, models["tied"])
    assert kept == 0 and summed > 0


def _disagree(folder: Path) -> list[bool]:
    from openrlhf.models import probe

    before = dict(probe.TOLERANCE)
    if int(os.environ["RANK"]) == 1:
        # Nothing is as close as this: this rank finds that rows see one another.
        probe.TOLERANCE[torch.float32] = -1.0
    try:
        return [worker.make_backend(folder, stage).plan.packed for stage in (0, 3)]
    finally:
        probe.TOLERANCE.update(before)


def test_ranks_that_judge_packing_differently_all_pad(models: dict[str, Path]) -> None:
    assert worker.run_ranks(_disagree, 2, models["tied"]) == [[False, False], [False, False]]


def _break_steps(folder: Path) -> None:
    from openrlhf.backends.deepspeed_backend import GradientError
    from openrlhf.data.packed_batch import empty_batch

    for stage in (0, 2, 3):
        backend = worker.make_backend(folder, stage)
        before = worker.full_weights(backend)
        loss = backend.forward(empty_batch(pad_token_id=0)).logprobs.sum()
        assert loss.item() == 0.0
        backend.backward(loss)
        result = backend.step()
        assert result.grad_norm == 0.0 and not result.skipped
        batch = worker.micro_batches(0)[0]
        backend.backward(backend.forward(batch).logprobs.sum() * float("nan"))
        with pytest.raises(GradientError):
            backend.step()
        for name, tensor in worker.full_weights(backend).items():
            decayed = before[name] * (1 - worker.LR * 0.1) if tensor.dim() > 1 else before[name]
            torch.testing.assert_close(tensor, decayed, rtol=1e-6, atol=1e-7)
    with pytest.raises(ConfigError, match="fp16"):
        worker.make_backend(folder, 2, dtype="fp16")


def test_a_step_of_empty_micro_batches_moves_nothing_and_a_gradient_of_nan_stops_the_run(
    models: dict[str, Path],
) -> None:
    worker.run_ranks(_break_steps, 2, models["tied"])


def _infer(folders: dict[str, Path]) -> None:
    from openrlhf.backends.deepspeed_backend import DeepSpeedBackend
    from openrlhf.config import DeepSpeedConfig

    for folder in folders.values():
        trained = worker.make_backend(folder, 2)
        batch = worker.micro_batches(1)[2]
        with torch.no_grad():
            expected = trained.forward(batch, temperature=0.6, entropy=True)
        for stage in (0, 2, 3):
            ds = DeepSpeedConfig(zero_stage=stage, param_dtype="fp32")
            backend = DeepSpeedBackend.for_inference(folder, ds=ds, device="cpu", keep_whole=worker.KEEP_WHOLE)
            with torch.no_grad():
                found = backend.forward(batch, temperature=0.6, entropy=True)
            torch.testing.assert_close(found.logprobs, expected.logprobs)
            torch.testing.assert_close(found.entropy, expected.entropy)
            backend.offload()
            backend.reload()
            names = [name for name, _ in backend.named_full_parameters()]
            assert names == [name for name, _ in trained.named_full_parameters()]


def test_a_reference_model_answers_alike_whole_and_sharded(models: dict[str, Path]) -> None:
    worker.run_ranks(_infer, 2, models)


LONE_PROCESS = """
import sys, torch
from openrlhf.backends.distributed import init_distributed
from tests.integration import backend_worker as worker
for _ in range(2):
    init_distributed("cpu", 60)
    backend = worker.make_backend(sys.argv[1], 2)
    print(*worker.train_with_backend(backend, range(1))["norms"])
    backend.close()
"""


def test_a_lone_process_needs_no_environment_can_join_again_and_exits_cleanly(models: dict[str, Path]) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    done = subprocess.run(
        [sys.executable, "-c", LONE_PROCESS, str(models["tied"])],
        capture_output=True,
        text=True,
        timeout=200,
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    first, second = [float(line) for line in done.stdout.splitlines()[-2:]]
    assert first == second == pytest.approx(worker.plain_training(models["tied"], steps=1)["norms"][0], rel=1e-6)
    assert "FutureWarning" not in done.stderr
