"""Learning-rate schedules and parameter groups."""

from __future__ import annotations

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from openrlhf.backends.base import StepResult
from openrlhf.backends.muon import MuonWithAdamW, muon_parameters, orthogonalize, rates_of
from openrlhf.backends.optimizer import build_adamw, build_optimizer, build_scheduler, parameter_groups
from openrlhf.config import AdamConfig, ConfigError, MuonConfig, OptimizerConfig
from openrlhf.config.checks_training import SCHEDULERS
from tests.tiny_models import tiny_config


def _rates(name: str, *, lr: float, steps: int, warmup: float, floor: float) -> list[float]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = build_scheduler(optimizer, name, total_steps=steps, warmup_ratio=warmup, min_lr_ratio=floor)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return [*rates, optimizer.param_groups[0]["lr"]]


@pytest.mark.parametrize(
    ("name", "final"),
    [
        ("cosine_with_min_lr", 2e-7),
        ("warmup_stable_decay", 2e-7),
        ("linear", 0.0),
        ("constant", 2e-6),
        ("constant_with_warmup", 2e-6),
        ("cosine", 0.0),
        ("cosine_with_restarts", 0.0),
        ("polynomial", 1e-7),
        ("inverse_sqrt", None),
    ],
)
def test_every_schedule_starts_and_ends_at_its_floor(name: str, final: float | None) -> None:
    # RB69
    rates = _rates(name, lr=2e-6, steps=100, warmup=0.03, floor=0.1)
    if final is not None:
        assert rates[-1] == pytest.approx(final, rel=1e-5, abs=1e-18)
    assert max(rates) == pytest.approx(2e-6)
    if name != "constant":
        assert rates[0] < rates[1] < rates[2] < rates[3] == pytest.approx(2e-6)


def test_the_schedule_that_warms_up_along_a_cosine_starts_too_and_has_its_floor() -> None:
    # transformers counts its steps in a way of its own, so that the last one lies just above the floor.
    rates = _rates("cosine_warmup_with_min_lr", lr=2e-6, steps=100, warmup=0.03, floor=0.1)
    assert rates[-1] == pytest.approx(2e-7, rel=0.01)


def test_warm_up_takes_its_share_of_the_steps_rounded_up() -> None:
    rates = _rates("constant_with_warmup", lr=1.0, steps=10, warmup=0.25, floor=0.0)
    assert rates[:4] == pytest.approx([0, 1 / 3, 2 / 3, 1.0])


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("warmup", [0.03, 0.5, 1.0])
def test_a_short_run_is_never_all_warm_up(name: str, warmup: float) -> None:
    # A run of one step at a rate of 0 would export the model that it was given.
    for steps in range(1, 6):
        rates = _rates(name, lr=1.0, steps=steps, warmup=warmup, floor=0.1)
        assert rates[steps - 1] > 0, f"{steps} steps: {rates}"


@pytest.mark.parametrize("name", ["sawtooth", "reduce_lr_on_plateau"])
def test_a_schedule_that_cannot_be_driven_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--lr_scheduler {name}"):
        _rates(name, lr=1.0, steps=10, warmup=0.0, floor=0.0)


def test_matrices_decay_and_biases_and_norms_do_not() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("qwen2"))
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    decayed, kept = parameter_groups(model.named_parameters(), 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1 and kept["weight_decay"] == 0.0
    assert all(names[id(parameter)].endswith(("bias", "norm.weight")) for parameter in kept["params"])
    assert not any("norm" in names[id(parameter)] or "bias" in names[id(parameter)] for parameter in decayed["params"])
    assert len(decayed["params"]) + len(kept["params"]) == len(names) - 1
    optimizer = build_adamw(
        model, AdamConfig(lr=3e-4, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1), torch.device("cpu")
    )
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.defaults["betas"] == (0.8, 0.9) and optimizer.defaults["eps"] == 1e-6


MUON = OptimizerConfig(optim="muon", adam=AdamConfig(lr=1e-6, weight_decay=0.1), muon=MuonConfig(lr=0.02))


def _names(model: torch.nn.Module, parameters: list[torch.nn.Parameter]) -> set[str]:
    wanted = {id(parameter) for parameter in parameters}
    return {name for name, parameter in model.named_parameters() if id(parameter) in wanted}


@pytest.mark.parametrize("tie", [True, False])
def test_muon_takes_the_matrices_of_hidden_layers_and_each_kind_starts_at_its_own_rate(tie: bool) -> None:
    # RB75: the AdamW group once ran at the rate of the matrices.
    model = AutoModelForCausalLM.from_config(tiny_config("qwen2", tie_word_embeddings=tie))
    optimizer = build_optimizer(model, MUON, torch.device("cpu"), torch.float32)
    muon, *adam = optimizer.param_groups
    assert _names(model, muon["params"]) == {n for n, _ in model.named_parameters() if n.endswith("_proj.weight")}
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 1e-6, 1e-6]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    scheduler = build_scheduler(optimizer, "linear", total_steps=4, warmup_ratio=0.0, min_lr_ratio=0.0)
    optimizer.step()
    scheduler.step()
    assert rates_of(optimizer.param_groups) == pytest.approx({"lr": 0.015, "adam_lr": 0.75e-6})


def test_scalar_heads_convolutions_and_frozen_weights_are_not_orthogonalized_and_experts_are() -> None:
    judge = AutoModelForSequenceClassification.from_config(tiny_config("qwen3", num_labels=1))
    judge.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    names = _names(judge, muon_parameters(judge))
    assert "score.weight" not in names and "model.layers.0.mlp.up_proj.weight" not in names
    assert "model.layers.1.mlp.up_proj.weight" in names
    mamba = AutoModelForCausalLM.from_config(tiny_config("mamba"))
    assert not any("conv1d" in name for name in _names(mamba, muon_parameters(mamba)))
    experts = AutoModelForCausalLM.from_config(tiny_config("qwen2_moe"))
    stacks = {name for name, parameter in experts.named_parameters() if parameter.dim() == 3}
    assert stacks and stacks <= _names(experts, muon_parameters(experts))


def test_a_model_without_a_matrix_is_not_trained_with_muon() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("qwen2"))
    for parameter in muon_parameters(model):
        parameter.requires_grad_(False)
    with pytest.raises(ConfigError, match="--optim muon: .* no trainable matrix"):
        build_optimizer(model, MUON, torch.device("cpu"), torch.float32)


def test_muon_alone_moves_a_model_of_matrices() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("qwen2"))
    matrices = muon_parameters(model)
    model.requires_grad_(False)
    for parameter in matrices:
        parameter.requires_grad_(True)
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    optimizer = build_optimizer(model, MUON, torch.device("cpu"), torch.float32)
    before = matrices[0].detach().clone()
    optimizer.step()
    assert rates_of(optimizer.param_groups) == {"lr": 0.02}
    assert not torch.equal(matrices[0], before)


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_orthogonalizing_in_bfloat16_is_what_torch_does_and_in_float32_nears_orthogonal(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ours = orthogonalize(matrix, 5, torch.bfloat16)
    assert torch.equal(ours, _zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7))
    values = torch.linalg.svdvals(orthogonalize(matrix, 12, torch.float32))
    assert 0.65 < values.min() and values.max() < 1.25
    stack = torch.stack([matrix, 2 * matrix, torch.zeros(shape)])
    each = orthogonalize(stack, 5, torch.float32)
    assert torch.equal(each[0], orthogonalize(matrix, 5, torch.float32)) and not each[2].any()
    assert torch.allclose(each[0], each[1], atol=1e-6)


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_steps_follow_every_setting_of_muon(nesterov: bool) -> None:
    start = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    ours, plain = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    settings = MuonConfig(lr=0.1, momentum=0.8, ns_steps=3, nesterov=nesterov)
    options = {"muon": settings, "weight_decay": 0.2, "compute": torch.bfloat16, "device": torch.device("cpu")}
    optimizers = [
        MuonWithAdamW([ours], None, **options),
        torch.optim.Muon([plain], lr=0.1, momentum=0.8, ns_steps=3, nesterov=nesterov, weight_decay=0.2),
    ]
    for seed in range(3):
        gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        for parameter, optimizer in zip((ours, plain), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    assert torch.equal(ours, plain)


def test_the_metrics_of_a_step_name_the_second_rate_only_where_there_is_one() -> None:
    assert StepResult(1.0, False, 0.02, 1e-6).rate_metrics("critic") == {"critic/lr": 0.02, "critic/adam_lr": 1e-6}
    assert StepResult(1.0, False, 1e-6).rate_metrics("actor") == {"actor/lr": 1e-6}
    assert StepResult(1.0, False, 0.02, 1e-6).lowest_lr == 1e-6 == StepResult(1.0, False, 1e-6).lowest_lr
