"""The losses of a reward model: recorded values, a slow twin, and scores that overflow what is written carelessly."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.algorithms.preference_reward import PAIRWISE_LOSSES, pairwise_loss
from openrlhf.config.checks_training import RM_LOSSES
from tests.unit.test_algorithms_golden import cases

SCORE = st.floats(-30, 30)
PAIRS = st.lists(st.tuples(SCORE, SCORE, st.floats(-3, 3)), min_size=1, max_size=8)


def columns(pairs):
    return torch.tensor(pairs, dtype=torch.float64).unbind(1)


@pytest.mark.parametrize(("golden", "case"), cases("reward_model_loss", 2))
@pytest.mark.parametrize("kind", PAIRWISE_LOSSES)
def test_the_loss_is_the_recorded_one_with_and_without_margin(golden, case, kind):
    chosen, rejected, margin = (torch.tensor(case["inputs"][name], dtype=torch.float64) for name in case["inputs"])
    assert pairwise_loss(chosen, rejected, kind=kind).mean().item() == pytest.approx(case[kind], abs=1e-9)
    assert pairwise_loss(chosen, rejected, margin, kind=kind).mean().item() == pytest.approx(
        case[f"{kind}_margin"], abs=1e-9
    )


@pytest.mark.parametrize("kind", PAIRWISE_LOSSES)
@given(pairs=PAIRS)
@settings(deadline=None, max_examples=60)
def test_loss_and_gradient_agree_with_the_formula_pair_by_pair(kind, pairs):
    chosen, rejected, margin = columns(pairs)
    chosen.requires_grad_()
    rejected.requires_grad_()
    losses = pairwise_loss(chosen, rejected, margin, kind=kind)
    losses.sum().backward()
    for i, (better, worse, least) in enumerate(pairs):
        odds = math.exp(-(better - worse - least))
        assert losses[i].item() == pytest.approx(math.log1p(odds), rel=1e-9, abs=1e-12)
        assert chosen.grad[i].item() == pytest.approx(-odds / (1 + odds), rel=1e-6, abs=1e-12)
        assert rejected.grad[i].item() == pytest.approx(odds / (1 + odds), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("kind", PAIRWISE_LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_far_apart_give_finite_losses_and_gradients(kind, dtype):
    chosen = torch.tensor([-1e4, 1e4, 0.0], dtype=dtype, requires_grad=True)
    losses = pairwise_loss(chosen, -chosen.detach(), torch.tensor([0.0, 0.0, 200.0]), kind=kind)
    losses.sum().backward()
    assert losses.dtype == torch.float32
    assert losses.tolist() == pytest.approx([2e4, 0.0, 200.0], rel=1e-2)
    assert chosen.grad.float().tolist() == pytest.approx([-1.0, 0.0, -1.0])


def test_a_score_that_is_no_number_surfaces():
    assert pairwise_loss(torch.tensor([math.nan, 1.0]), torch.zeros(2)).isnan().tolist() == [True, False]


def test_the_losses_are_those_that_the_flag_names():
    assert tuple(PAIRWISE_LOSSES) == RM_LOSSES
    with pytest.raises(ValueError, match="sigmoid, logexp, got 'hinge'"):
        pairwise_loss(torch.zeros(1), torch.zeros(1), kind="hinge")
