"""Learning-rate schedules and parameter groups."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrlhf.backends.optimizer import build_adamw, build_scheduler, parameter_groups
from openrlhf.config import AdamConfig, ConfigError
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
