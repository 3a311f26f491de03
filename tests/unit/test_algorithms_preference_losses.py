"""Every preference loss beside recorded values, a slow twin written from its paper, and what it must survive."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.algorithms.preference_loss import (
    PREFERENCE_LOSSES,
    REFERENCE_FREE,
    SMOOTHED_LOSSES,
    PairInputs,
    chosen_nll,
    kto_reference_point,
    pair_metrics,
    preference_loss,
    register_preference_loss,
    response_sums,
)
from tests.unit.ragged_rows import checked, f64, laid_out, numbers, per_row, ragged

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
NAMES = sorted(PREFERENCE_LOSSES)
TENSORS = ("chosen", "rejected", "ref_chosen", "ref_rejected")


def pairs(chosen, rejected, ref_chosen, ref_rejected, tokens=None, **settings):
    given_tokens = tokens or ([1] * len(chosen), [1] * len(chosen))
    return PairInputs(
        f64(chosen).requires_grad_(),
        f64(rejected).requires_grad_(),
        f64(ref_chosen).requires_grad_(),
        f64(ref_rejected).requires_grad_(),
        *(torch.tensor(counts) for counts in given_tokens),
        **({"beta": 0.1} | settings),
    )


def golden(name):
    table = json.loads((GOLDEN / f"rl_math_{name}.json").read_text())
    (case,) = (case for case in table["cases"] if case["what"] == "preference_loss")
    given = case["inputs"]
    tokens = [[int(n) for n in given[key]] for key in ("chosen_tokens", "rejected_tokens")]
    values = (given[key] for key in ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected"))
    return case, pairs(*values, tokens=tokens, beta=given["beta"])


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize(
    ("key", "loss", "settings"),
    [
        ("dpo", "dpo", {}),
        ("cdpo_0.1", "dpo", {"label_smoothing": 0.1}),
        ("ipo_per_token_mean", "ipo", {}),
        ("ipo_sum", "ipo", {"ipo_sum": True}),
    ],
)
def test_losses_of_pairs_have_the_recorded_values(name, key, loss, settings):
    case, inputs = golden(name)
    assert preference_loss(loss, replace(inputs, **settings)).loss.mean().item() == pytest.approx(case[key], abs=1e-9)


@pytest.mark.parametrize("name", ["a", "b"])
def test_rewards_of_dpo_have_the_recorded_values(name):
    case, inputs = golden(name)
    losses = preference_loss("dpo", inputs)
    assert losses.chosen_rewards.tolist() == pytest.approx(case["chosen_rewards"], abs=1e-9)
    assert losses.rejected_rewards.tolist() == pytest.approx(case["rejected_rewards"], abs=1e-9)


def test_prompts_of_both_halves_are_left_out_of_the_sums():
    # Logits at the first token of a row do not exist; what stands at prompts must not matter, be it NaN.
    batch = laid_out([[False, False, True, True], [False, False, True, True]])
    policy = f64([math.nan, -1, -2, -3, math.nan, -1, -4, -6])
    reference = f64([math.nan, -1, -2, -4, math.nan, -1.3, -4, -5])
    sums, tokens = response_sums(policy, batch.mask, batch.cu_seqlens)
    ref_sums, _ = response_sums(reference, batch.mask, batch.cu_seqlens)
    assert (sums.tolist(), ref_sums.tolist(), tokens.tolist()) == ([-5, -10], [-6, -9], [2, 2])
    losses = preference_loss("dpo", PairInputs(*(x[i::2] for x in (sums, ref_sums) for i in (0, 1)), None, None, 0.1))
    assert losses.loss.item() == pytest.approx(0.598139, abs=1e-5)
    assert (losses.chosen_rewards.item(), losses.rejected_rewards.item()) == pytest.approx((0.1, -0.1))


def test_each_option_gives_its_own_loss():
    inputs = pairs([-1.0], [-3.0], [-2.0], [-2.0])
    values = [
        preference_loss("dpo", inputs).loss.item(),
        preference_loss("dpo", replace(inputs, label_smoothing=0.1)).loss.item(),
        preference_loss("ipo", inputs).loss.item(),
    ]
    assert values == pytest.approx([0.598139, 0.618139, 9.0], abs=1e-5)


def test_ipo_takes_means_over_tokens_and_sums_where_they_are_asked_for():
    inputs = pairs([-6.0], [-8.0], [-9.0], [-6.0], tokens=([3], [4]))
    assert preference_loss("ipo", inputs).loss.item() == pytest.approx(12.25)
    assert preference_loss("ipo", replace(inputs, ipo_sum=True)).loss.item() == pytest.approx(0.0)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def slow(name, c, r, rc, rr, nc, nr, s):
    """Loss of one pair, and its derivatives by the two log-probs of the policy."""
    beta, e = s["beta"], s["label_smoothing"]
    if name == "dpo":
        h = beta * ((c - rc) - (r - rr))
        slope = beta * (-(1 - e) * sigmoid(-h) + e * sigmoid(h))
        return -(1 - e) * math.log(sigmoid(h)) - e * math.log(sigmoid(-h)), slope, -slope
    if name == "ipo":
        nc, nr = (1, 1) if s["ipo_sum"] else (nc, nr)
        gap = (c - rc) / nc - (r - rr) / nr - 1 / (2 * beta)
        return gap**2, 2 * gap / nc, -2 * gap / nr
    if name == "simpo":
        h = beta * (c / nc - r / nr) - s["simpo_gamma"]
        slope = beta * (-(1 - e) * sigmoid(-h) + e * sigmoid(h))
        return -(1 - e) * math.log(sigmoid(h)) - e * math.log(sigmoid(-h)), slope / nc, -slope / nr
    if name == "kto":
        z = s["reference_point"]
        good, bad = sigmoid(beta * (c - rc - z)), sigmoid(beta * (z - (r - rr)))
        w_good, w_bad = s["desirable_weight"], s["undesirable_weight"]
        loss = w_good * (1 - good) / 2 + w_bad * (1 - bad) / 2
        return loss, -w_good * beta * good * (1 - good) / 2, w_bad * beta * bad * (1 - bad) / 2
    assert name == "orpo"
    p, q = math.exp(c / nc), math.exp(r / nr)
    odds_ratio = (p / (1 - p)) / (q / (1 - q))
    share = odds_ratio / (1 + odds_ratio)
    slope = -beta * (1 - share)
    return -c / nc - beta * math.log(share), (-1 + slope / (1 - p)) / nc, -slope / (1 - q) / nr


@st.composite
def drawn_pairs(draw, name):
    count = draw(st.integers(1, 5))
    values = [-(draw(numbers(count, 4.0)).abs() + 0.01) for _ in range(4)]
    tokens = [draw(st.lists(st.integers(1, 6), min_size=count, max_size=count)) for _ in range(2)]
    settings = {
        "beta": draw(st.sampled_from([0.05, 0.1, 0.7, 2.0])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.1, 0.4])) if name in SMOOTHED_LOSSES else 0.0,
        "ipo_sum": draw(st.booleans()),
        "simpo_gamma": draw(st.sampled_from([0.0, 0.5])),
        "reference_point": draw(st.sampled_from([0.0, 0.3, 2.0])),
        "desirable_weight": draw(st.sampled_from([1.0, 1.3])),
        "undesirable_weight": draw(st.sampled_from([1.0, 0.7])),
    }
    return pairs(*(value.tolist() for value in values), tokens=tokens, **settings), settings


@given(data=st.data())
@pytest.mark.parametrize("name", NAMES)
@checked(100)
def test_a_preference_loss_agrees_with_its_slow_twin_in_value_and_gradient(data, name):
    inputs, settings = data.draw(drawn_pairs(name))
    losses = preference_loss(name, inputs)
    losses.loss.sum().backward()
    columns = [getattr(inputs, key).tolist() for key in (*TENSORS, "chosen_tokens", "rejected_tokens")]
    for i, row in enumerate(zip(*columns, strict=True)):
        loss, by_chosen, by_rejected = slow(name, *row, settings)
        found = (losses.loss[i].item(), inputs.chosen.grad[i].item(), inputs.rejected.grad[i].item())
        assert found == pytest.approx((loss, by_chosen, by_rejected), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_no_gradient_reaches_the_reference(name):
    inputs = pairs([-1.0, -2.0], [-3.0, -1.5], [-2.0, -1.0], [-2.0, -4.0], reference_point=0.2)
    preference_loss(name, inputs).loss.sum().backward()
    assert inputs.ref_chosen.grad is None and inputs.ref_rejected.grad is None
    assert not preference_loss(name, inputs).chosen_rewards.requires_grad


def test_dpo_of_a_policy_that_equals_its_reference_is_log_2():
    inputs = pairs([-1.5, -7.0], [-3.0, -0.2], [-1.5, -7.0], [-3.0, -0.2])
    assert preference_loss("dpo", inputs).loss.tolist() == pytest.approx([math.log(2)] * 2)
    assert preference_loss("dpo", replace(inputs, label_smoothing=0.3)).loss.tolist() == pytest.approx(
        [math.log(2)] * 2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_extreme_log_probs_keep_value_and_gradient_finite(name, dtype):
    extremes = torch.tensor([0.0, -1e-9, -1e-4, -0.7, -50.0, -1e4], dtype=dtype)
    grid = torch.cartesian_prod(extremes, extremes)
    chosen, rejected = (grid[:, i].clone().requires_grad_() for i in (0, 1))
    ones = torch.ones(len(grid), dtype=torch.long)
    inputs = PairInputs(chosen, rejected, grid[:, 1], grid[:, 0], ones, ones, 2.0, reference_point=0.0)
    loss = preference_loss(name, inputs).loss
    loss.sum().backward()
    assert all(torch.isfinite(x).all() for x in (loss, chosen.grad, rejected.grad))


def test_a_pair_that_is_far_wrong_keeps_its_gradient_in_float32():
    chosen = torch.tensor([-4000.0], requires_grad=True)
    one = torch.ones(1, dtype=torch.long)
    loss = preference_loss("dpo", PairInputs(chosen, *torch.zeros(3, 1), one, one, 0.1)).loss
    loss.backward()
    assert (loss.item(), chosen.grad.item()) == pytest.approx((400.0, -0.1))


@pytest.mark.parametrize("name", NAMES)
def test_an_undefined_log_prob_surfaces(name):
    inputs = pairs([math.nan], [-1.0], [-1.0], [-1.0], reference_point=0.0)
    assert preference_loss(name, inputs).loss.isnan().all()


@given(data=st.data())
@checked(60)
def test_sums_over_responses_agree_with_a_loop(data):
    lengths, rows, cu, mask = data.draw(ragged())
    flat = data.draw(numbers(sum(lengths)))
    sums, tokens = response_sums(torch.where(mask, flat, math.nan), mask, cu)
    picked = [
        [x for x, m in zip(xs, row, strict=True) if m] for xs, row in zip(per_row(flat, lengths), rows, strict=True)
    ]
    assert sums.tolist() == pytest.approx([sum(xs) for xs in picked])
    assert tokens.tolist() == [len(xs) for xs in picked]


def test_metrics_of_pairs_are_those_of_their_rewards():
    inputs = pairs(
        [-2.0, -6.0, -1.0], [-3.0, -1.0, -1.0], [-2.5, -4.0, -1.0], [-2.0, -1.5, -1.0], tokens=([2, 3, 1], [1] * 3)
    )
    metrics = pair_metrics(preference_loss("dpo", inputs), chosen_nll(inputs))
    assert {name: value.tolist() for name, value in metrics.items()} == {
        "accuracy": [1.0, 0.0, 0.0],
        "reward_chosen": pytest.approx([0.05, -0.2, 0.0]),
        "reward_rejected": pytest.approx([-0.1, 0.05, 0.0]),
        "reward_gap": pytest.approx([0.15, -0.25, 0.0]),
        "nll": pytest.approx([1.0, 2.0, 1.0]),
    }


def test_the_reference_point_of_kto_is_never_below_zero_and_has_no_gradient():
    total = f64(3.0).requires_grad_()
    assert kto_reference_point(total, 4).item() == 0.75 and not kto_reference_point(total, 4).requires_grad
    assert kto_reference_point(f64(-3.0), 4).item() == 0.0
    with pytest.raises(ValueError, match="at least one response"):
        kto_reference_point(total, 0)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("nosuch", {}, "unknown preference loss 'nosuch'; there are dpo, ipo, kto, orpo, simpo"),
        ("dpo", {"beta": 0.0}, "beta must be above 0"),
        ("ipo", {"beta": math.nan}, "beta must be above 0"),
        ("dpo", {"label_smoothing": 0.5}, "below 0.5"),
        ("dpo", {"label_smoothing": -0.1}, "at least 0"),
        ("ipo", {"label_smoothing": 0.1}, "ipo has no label smoothing; use dpo or simpo"),
        ("kto", {"reference_point": None}, "needs a reference point"),
        *((name, {"ref_rejected": None}, "needs the log-probs of a reference") for name in ("dpo", "ipo", "kto")),
    ],
)
def test_what_a_loss_cannot_be_computed_from_is_refused(name, changes, words):
    with pytest.raises(ValueError, match=words):
        preference_loss(name, replace(pairs([-1.0], [-2.0], [-1.0], [-2.0]), **changes))


@pytest.mark.parametrize("name", REFERENCE_FREE)
def test_a_loss_without_a_reference_needs_none(name):
    inputs = replace(pairs([-1.0], [-2.0], [-1.0], [-2.0]), ref_chosen=None, ref_rejected=None)
    assert torch.isfinite(preference_loss(name, inputs).loss).all()


def test_a_name_is_given_to_one_loss_only():
    with pytest.raises(ValueError, match="the preference loss 'dpo' exists already"):
        register_preference_loss("dpo")(lambda inputs: None)
