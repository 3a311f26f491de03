"""Every policy loss beside a slow twin written from its paper, and what all of them must survive."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.algorithms.aggregate import aggregate, count_units
from openrlhf.algorithms.policy_loss import (
    DEMANDED_AGGREGATION,
    DUAL_CLIP_LOSSES,
    POLICY_LOSSES,
    PolicyLossInputs,
    policy_loss,
    ppo,
    register_policy_loss,
)
from tests.unit.ragged_rows import bools, checked, f64, laid_out, numbers, ragged, randn

NAN = math.nan
NAMES = sorted(POLICY_LOSSES)
LOW, HIGH, CEILING, TAU_POSITIVE, TAU_NEGATIVE = 0.2, 0.3, 1.4, 0.7, 1.6


def inputs_of(batch, new, old, adv):
    """Inputs of a loss with whatever stands outside the mask poisoned."""
    new, old, adv = (torch.where(batch.mask, x, NAN) for x in (new, old, adv))
    return PolicyLossInputs(
        new.requires_grad_(),
        old,
        adv,
        batch.mask,
        batch.cu_seqlens,
        LOW,
        HIGH,
        cispo_ceiling=CEILING,
        sapo_tau_positive=TAU_POSITIVE,
        sapo_tau_negative=TAU_NEGATIVE,
    )


@st.composite
def drawn_inputs(draw):
    batch = draw(ragged())
    return inputs_of(batch, *(draw(numbers(batch.mask.numel())) for _ in range(3)))


def example():
    batch = laid_out([[False, True, True], [False, False], [False, True, False, True, True]])
    return inputs_of(batch, *(randn(10, seed) for seed in range(3)))


def trained_by_row(inputs):
    bounds = inputs.cu_seqlens.tolist()
    return [[t for t in range(a, b) if inputs.mask[t]] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def clipped_twin(ratio, a, dual_clip):
    objective = torch.minimum(ratio * a, ratio.clamp(1 - LOW, 1 + HIGH) * a)
    return -torch.maximum(objective, dual_clip * a) if dual_clip is not None and a < 0 else -objective


def twin(name, inputs, new):
    """Returns: {token: loss} of the trained tokens, with a gradient to ``new``, a list of scalars."""
    losses, ratios = {}, {}
    for row in trained_by_row(inputs):
        log_ratios = {t: new[t] - inputs.old_logprobs[t] for t in row}
        if not row:
            continue
        if name == "gspo":
            sequence = torch.exp(sum(log_ratios.values()) / len(row))
        if name == "gmpo":
            bounded = []
            for t in row:
                sign = 1.0 if inputs.advantages[t] > 0 else -1.0
                most = HIGH if sign > 0 else LOW
                kept = sign * torch.minimum(sign * log_ratios[t], f64(most))
                bounded.append(kept.clamp(max=HIGH) if inputs.advantages[t] == 0 else kept)
            sequence = torch.exp(sum(bounded) / len(row))
        for t in row:
            a = inputs.advantages[t]
            ratios[t] = sequence if name in ("gspo", "gmpo") else log_ratios[t].exp()
            if name in ("ppo", "gspo"):
                losses[t] = clipped_twin(ratios[t], a, inputs.dual_clip)
            elif name == "cispo":
                losses[t] = -min(ratios[t].item(), CEILING) * a * new[t]
            elif name == "sapo":
                tau = TAU_POSITIVE if a > 0 else TAU_NEGATIVE
                losses[t] = -4 / tau / (1 + torch.exp(-tau * (ratios[t] - 1))) * a
            else:
                losses[t] = -ratios[t] * a
    return losses, ratios


@given(data=st.data())
@pytest.mark.parametrize(
    ("name", "dual_clip"), [*((name, None) for name in NAMES), *((name, 1.5) for name in DUAL_CLIP_LOSSES)]
)
@checked(100)
def test_every_loss_agrees_with_its_twin_in_value_and_gradient(data, name, dual_clip):
    inputs = replace(data.draw(drawn_inputs()), dual_clip=dual_clip)
    total = inputs.mask.numel()
    weights = data.draw(numbers(total))
    loss, stats = policy_loss(name, inputs)
    (loss * weights).sum().backward()

    new = [inputs.logprobs[t].detach().clone().requires_grad_() for t in range(total)]
    losses, ratios = twin(name, inputs, new)
    sum(weights[t] * value for t, value in losses.items()).backward()
    expected = [losses[t].item() if t in losses else 0.0 for t in range(total)]
    gradient = [0.0 if x.grad is None or t not in losses else x.grad.item() for t, x in enumerate(new)]
    assert loss.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert inputs.logprobs.grad.tolist() == pytest.approx(gradient, rel=1e-9, abs=1e-12)
    means = stats.means()
    assert means["ratio_mean"] == pytest.approx(sum(r.item() for r in ratios.values()) / len(ratios))
    assert means["ppo_kl"] == pytest.approx(sum((inputs.old_logprobs[t] - new[t]).item() for t in losses) / len(losses))
    assert set(means) == {"ppo_kl", "clip_fraction", "ratio_mean"} and stats.count == len(losses)


@given(data=st.data())
@pytest.mark.parametrize("name", ["gspo", "gmpo"])
@checked(120)
def test_the_sequence_mean_of_a_sequence_loss_is_the_objective_of_its_paper(data, name):
    inputs = data.draw(drawn_inputs())
    rows = trained_by_row(inputs)
    by_row = data.draw(numbers(len(rows)))
    adv = torch.cat([by_row[i].repeat(n) for i, n in enumerate(inputs.cu_seqlens.diff().tolist())])
    inputs = replace(inputs, advantages=adv)
    loss, _ = policy_loss(name, inputs)
    mode = DEMANDED_AGGREGATION[name]
    assert mode == "seq_mean"
    value = aggregate(
        loss, inputs.mask, inputs.cu_seqlens, mode, int(count_units(inputs.mask, inputs.cu_seqlens, mode))
    )
    value.backward()

    new = inputs.logprobs.detach().clone().requires_grad_()
    objectives = []
    for row, a in zip(rows, by_row, strict=True):
        if not row:
            continue
        log_ratio = new[row] - inputs.old_logprobs[row]
        if name == "gspo":
            s = log_ratio.mean().exp()
            objectives.append(torch.minimum(s * a, s.clamp(1 - LOW, 1 + HIGH) * a))
        else:
            bounded = log_ratio.clamp(max=HIGH) if a > 0 else log_ratio.clamp(min=-LOW)
            objectives.append(bounded.exp().prod() ** (1 / len(row)) * a)
    (-sum(objectives) / len(objectives)).backward()
    assert value.item() == pytest.approx(-sum(x.item() for x in objectives) / len(objectives), rel=1e-9)
    expected = torch.where(inputs.mask, new.grad, 0.0)
    torch.testing.assert_close(inputs.logprobs.grad, expected, rtol=1e-9, atol=1e-12)


def test_gspo_is_a_ratio_of_sequences_and_a_mean_over_sequences():
    mask, cu = bools([1, 1, 1, 1, 0, 0]), torch.tensor([0, 3, 6])
    log_ratio, adv = f64([0.1, -0.3, 0.5, 0.2, 0, 0]), f64([1, 1, 1, -1, 0, 0])
    inputs = PolicyLossInputs(log_ratio, torch.zeros_like(log_ratio), adv, mask, cu, 0.2, 0.2)
    loss, _ = policy_loss("gspo", inputs)
    assert loss[[0, 3]].tolist() == pytest.approx([-1.105171, 1.221403], abs=1e-6)
    assert aggregate(loss, mask, cu, "seq_mean", 2).item() == pytest.approx(0.058116, abs=1e-6)
    plain, _ = policy_loss("ppo", inputs)
    assert aggregate(loss, mask, cu, "token_mean", 4).item() == pytest.approx(-0.523527, abs=1e-6)
    assert aggregate(plain, mask, cu, "token_mean", 4).item() == pytest.approx(-0.456147, abs=1e-6)


def test_every_loss_type_gives_a_loss_of_its_own():
    inputs = example()
    totals = [policy_loss(name, inputs)[0].sum().item() for name in NAMES]
    assert len({round(total, 6) for total in totals}) == len(NAMES) == 5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", ["logprobs", "old_logprobs", "advantages"])
def test_nan_at_a_trained_token_shows_in_the_value_and_the_gradient_of_its_row_alone(name, where):
    tensors = {k: randn(5, seed) / 10 for seed, k in enumerate(("logprobs", "old_logprobs", "advantages"))}
    tensors[where][1] = NAN
    tensors["logprobs"].requires_grad_()
    inputs = PolicyLossInputs(
        **tensors, mask=bools([1] * 5), cu_seqlens=torch.tensor([0, 3, 5]), clip_low=2, clip_high=2
    )
    loss, _ = policy_loss(name, inputs)
    loss.sum().backward()
    grad = inputs.logprobs.grad
    assert loss[1].isnan() and grad[1].isnan()
    assert loss[3:].isfinite().all() and grad[3:].isfinite().all() and (grad[3:] != 0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_an_overflowing_ratio_leaves_a_finite_value_and_gradient(name, advantage):
    logprobs = torch.tensor([0.0, -0.3], requires_grad=True)
    inputs = PolicyLossInputs(
        logprobs,
        torch.tensor([-500.0, -0.3]),
        torch.tensor([advantage, 1.0]),
        bools([1, 1]),
        torch.tensor([0, 1, 2]),
        0.2,
        0.2,
    )
    loss, _ = policy_loss(name, inputs)
    loss.sum().backward()
    assert loss.isfinite().all() and logprobs.grad.isfinite().all()
    assert logprobs.grad[0].item() == (pytest.approx(-1.2 * advantage) if name == "cispo" else 0.0)
    assert logprobs.grad[1].item() == pytest.approx(-1.0)


def test_an_idle_token_beside_an_overflowing_row_is_no_nan():
    logprobs = torch.tensor([0.0, 0.0], requires_grad=True)
    inputs = PolicyLossInputs(
        logprobs, torch.tensor([-400.0, 0.0]), torch.tensor([-1.0, 0.0]), bools([1, 1]), torch.tensor([0, 2]), 0.2, 0.2
    )
    for name in ("gspo", "gmpo"):
        assert policy_loss(name, inputs)[0][1].item() == 0.0


def test_a_soft_gate_that_overflows_for_a_negative_advantage_has_no_gradient():
    logprobs = torch.tensor([0.0], requires_grad=True)
    inputs = PolicyLossInputs(
        logprobs, torch.tensor([-500.0]), torch.tensor([-2.0]), bools([1]), torch.tensor([0, 1]), 0.2, 0.2
    )
    loss, stats = policy_loss("sapo", inputs)
    loss.sum().backward()
    assert loss.item() == pytest.approx(8 / 1.05) and logprobs.grad.item() == 0.0
    assert stats.means()["clip_fraction"] == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_every_loss_has_the_gradient_of_the_policy_gradient(name):
    logprobs = f64([-0.5, -2.0]).requires_grad_()
    inputs = PolicyLossInputs(
        logprobs, logprobs.detach().clone(), f64([1.5, -0.5]), bools([1, 1]), torch.tensor([0, 1, 2]), 0.2, 0.2
    )
    loss, stats = policy_loss(name, inputs)
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-1.5, 0.5], rel=1e-12)
    assert stats.means() == {"ppo_kl": 0.0, "clip_fraction": 0.0, "ratio_mean": 1.0}


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_with_nothing_to_train_has_a_loss_of_zero_and_a_gradient_of_zero(name):
    logprobs = f64([NAN, -1.0]).requires_grad_()
    inputs = PolicyLossInputs(logprobs, f64([0.0, NAN]), f64([NAN, 1.0]), bools([0, 0]), torch.tensor([0, 2]), 0.2, 0.2)
    loss, stats = policy_loss(name, inputs)
    aggregate(loss, inputs.mask, inputs.cu_seqlens, "seq_mean", 0).backward()
    assert loss.tolist() == logprobs.grad.tolist() == [0.0, 0.0]
    assert stats.count == 0 and [value.item() for value in stats.sums.values()] == [0.0, 0.0, 0.0]


def test_clip_fraction_counts_what_each_rule_bounds():
    logprobs = f64([0.5, 0.5, -0.5, -0.5, 0.5])
    inputs = PolicyLossInputs(
        logprobs, torch.zeros(5).double(), f64([1, -1, 1, -1, 0]), bools([1] * 5), torch.arange(6), 0.2, 0.2
    )
    fractions = {name: policy_loss(name, inputs)[1].means()["clip_fraction"] for name in NAMES}
    assert fractions == pytest.approx({"ppo": 0.4, "gspo": 0.4, "gmpo": 0.4, "cispo": 0.4, "sapo": 0.0})


def test_the_ceiling_of_cispo_is_the_upper_clip_unless_it_has_its_own():
    inputs = PolicyLossInputs(f64([1.0]), f64([0.0]), f64([1.0]), bools([1]), torch.tensor([0, 1]), 0.2, 0.28)
    assert policy_loss("cispo", inputs)[0].item() == pytest.approx(-1.28)
    assert policy_loss("cispo", replace(inputs, cispo_ceiling=2.0))[0].item() == pytest.approx(-2.0)


def test_the_positional_ppo_is_the_registered_one():
    inputs = replace(example(), dual_clip=2.0)
    direct, _ = ppo(inputs.logprobs, inputs.old_logprobs, inputs.advantages, inputs.mask, LOW, HIGH, 2.0)
    assert torch.equal(direct, policy_loss("ppo", inputs)[0])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("sapo", {"sapo_tau_positive": 0.0}, "the positive tau of sapo must be above 0, got 0.0"),
        ("sapo", {"sapo_tau_negative": NAN}, "the negative tau of sapo must be above 0, got nan"),
        ("cispo", {"cispo_ceiling": 0.0}, "the ceiling of cispo must be above 0, got 0.0"),
        ("gspo", {"dual_clip": 1.0}, "dual clip must be above 1, got 1.0"),
        ("gmpo", {"dual_clip": 3.0}, "the policy loss gmpo has no dual clip; leave it out or use ppo or gspo"),
        ("cispo", {"dual_clip": 3.0}, "the policy loss cispo has no dual clip; leave it out or use ppo or gspo"),
        ("grpo", {}, "unknown policy loss 'grpo'; there are cispo, gmpo, gspo, ppo, sapo"),
    ],
)
def test_a_parameter_or_a_name_that_means_nothing_is_refused(name, change, message):
    with pytest.raises(ValueError) as caught:
        policy_loss(name, replace(example(), **change))
    assert str(caught.value) == message


def test_the_registry_of_losses_refuses_a_second_entry():
    with pytest.raises(ValueError, match="the policy loss 'gspo' exists already"):
        register_policy_loss("gspo")(POLICY_LOSSES["ppo"])
    assert POLICY_LOSSES["gspo"] is not POLICY_LOSSES["ppo"]
