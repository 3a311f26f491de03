"""Muon on every ZeRO stage, one and two ranks, against plain PyTorch: torch.optim.Muon beside torch.optim.AdamW."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import _muon

from openrlhf.config.optimizer import MuonConfig
from openrlhf.models.value_head import HeadSpec
from tests.integration import backend_worker as worker
from tests.tiny_models import make_tiny_model

MUON_LR = 0.01
OPTIMIZER = replace(worker.OPTIMIZER, optim="muon", muon=MuonConfig(lr=MUON_LR, momentum=0.9, ns_steps=4))
ALL_STEPS = range(worker.STEPS)


def _reference_zeropower(
    gradient: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """What the iterations do to singular values, done to the singular values."""
    a, b, c = coefficients
    left, values, right = torch.linalg.svd(gradient.double(), full_matrices=False)
    values = values / values.norm().clamp(min=eps)
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
    return (left * values @ right).float()


def _plain_optimizers(model: Any) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if name.endswith("_proj.weight")]
    others = [p for name, p in model.named_parameters() if not name.endswith("_proj.weight")]
    groups = [
        {"params": [p for p in others if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in others if p.dim() == 1], "weight_decay": 0.0},
    ]
    return [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.1, momentum=0.9, nesterov=True, ns_steps=4),
        torch.optim.AdamW(groups, lr=worker.LR, betas=(0.9, 0.95), eps=worker.EPS),
    ]


def _train_every_way(folders: dict[str, Path], expected: dict[str, dict[str, Any]]) -> int:
    """Returns: matrices that more than one rank held a part of."""
    cases: list[tuple[str, int, dict[str, Any]]] = [
        *(("tied", stage, {}) for stage in (0, 1, 2, 3)),
        ("untied", 2, {}),
        ("untied", 3, {}),
        ("untied", 2, {"adam_offload": True}),
        ("untied", 3, {"adam_offload": True}),
    ]
    shared = 0
    for kind, stage, options in cases:
        case = f"{kind}, stage {stage}, {options}"
        backend = worker.make_backend(folders[kind], stage, optimizer=OPTIMIZER, **options)
        found = worker.train_with_backend(backend, ALL_STEPS)
        for key in ("losses", "norms"):
            assert found[key] == pytest.approx(expected[kind][key], rel=1e-6, abs=1e-6), f"{case}: {key}"
        assert found["rates"] == pytest.approx(expected[kind]["rates"], rel=1e-12)
        weights = worker.full_weights(backend)
        assert sorted(weights) == sorted(expected[kind]["weights"])
        for name, tensor in weights.items():
            assert (tensor - expected[kind]["weights"][name]).abs().max() <= 1e-6, f"{case}: {name}"
        assert backend.unmoved_parameters() == []
        optimizer = backend._engine.optimizer if stage == 0 else backend._engine.optimizer.optimizer
        shared += sum(not matrix.alone for group in optimizer._matrices.values() for matrix in group)
    return shared


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_zero_stage_takes_the_steps_of_torch_muon_beside_adamw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    # torch's iterations compute in bfloat16 whatever the model does, which would drown what is compared here.
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", _reference_zeropower)
    folders = {
        "tied": make_tiny_model(tmp_path / "tied", "qwen2", tie=True),
        "untied": make_tiny_model(tmp_path / "untied", "qwen3", tie=False),
    }
    expected = {
        kind: worker.plain_training(folder, make_optimizers=_plain_optimizers) for kind, folder in folders.items()
    }
    assert all(norm > 0.5 for norm in expected["tied"]["norms"]), "the clip has to be active"
    for shared in worker.run_ranks(_train_every_way, ranks, folders, expected):
        assert (shared > 0) == (ranks > 1)


def _train_in_bf16(folder: Path, expected: dict[str, Any]) -> None:
    for stage in (0, 1, 2, 3):
        backend = worker.make_backend(folder, stage, dtype="bf16", optimizer=replace(OPTIMIZER, max_norm=0.0))
        found = worker.train_with_backend(backend, ALL_STEPS)
        # As with AdamW: gradients of ranks are added up in bf16, and stage 1 rounds them to it even for one rank.
        exact = backend.world_size == 1 and stage >= 2
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-6 if exact else 1e-2)
        for name, tensor in worker.full_weights(backend).items():
            difference = (tensor.float() - expected["weights"][name].float()).abs().max()
            # The iterations enlarge what was rounded: a weight may differ by a fraction of the steps that it took.
            assert difference <= (0 if exact else MUON_LR), f"stage {stage}: {name}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_in_bf16_the_steps_are_those_of_torch_muon_bit_for_bit_where_gradients_are(tmp_path: Path, ranks: int) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen2")
    # A clip rounds in another way here and there, and bf16 iterations would make a step of that.
    expected = worker.mixed_precision_training(folder, make_optimizers=_plain_optimizers, max_norm=math.inf)
    worker.run_ranks(_train_in_bf16, ranks, folder, expected)


def _rates_of_a_critic(folder: Path) -> tuple[list[float], list[str]]:
    """Returns: the rates of the first step, and the names that AdamW moved."""
    backend = worker.make_backend(folder, 2, optimizer=OPTIMIZER, head=HeadSpec(fresh=True, seed=3))
    batch = worker.micro_batches(0)[0]
    backend.backward(backend.values(batch).square().sum())
    step = backend.step()
    muon = {id(p) for p in backend._engine.optimizer.bit16_groups[0]}
    return [step.lr, step.adam_lr], [n for n, p in backend.module.named_parameters() if id(p) not in muon]


def test_matrices_of_a_critic_start_at_the_rate_of_muon_and_its_head_and_embedding_at_that_of_adam(
    tmp_path: Path,
) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3")
    ((rates, names),) = worker.run_ranks(_rates_of_a_critic, 1, folder)
    assert rates == [MUON_LR, worker.LR]
    assert {"model.embed_tokens.weight", "score.weight", "model.norm.weight"} <= set(names)
    assert not any("proj" in name for name in names)


def _stop_and_resume(model: Path, folder: Path) -> None:
    for dtype, stage in (("fp32", 0), ("fp32", 2), ("fp32", 3), ("bf16", 1), ("bf16", 3)):
        case, target = f"{dtype}, stage {stage}", folder / f"{dtype}-{stage}"
        options = {"dtype": dtype, "total_steps": 4, "optimizer": OPTIMIZER}
        first = worker.make_backend(model, stage, **options)
        worker.train_with_backend(first, range(2))
        first.save_checkpoint(target, {})
        expected = worker.train_with_backend(first, range(2, 4))
        second = worker.make_backend(model, stage, **options)
        second.load_checkpoint(target)
        assert worker.train_with_backend(second, range(2, 4)) == expected, case
        weights = worker.full_weights(second)
        for name, tensor in worker.full_weights(first).items():
            assert torch.equal(weights[name], tensor), f"{case}: {name}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_resumed_with_its_momentum_goes_on_bit_for_bit(tmp_path: Path, ranks: int) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    worker.run_ranks(_stop_and_resume, ranks, model, tmp_path / "checkpoints")
