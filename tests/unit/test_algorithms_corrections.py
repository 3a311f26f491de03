"""The rollout correction, the value loss and the pull towards the reference model, beside slow twins."""

import math
import statistics

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from openrlhf.algorithms.aggregate import aggregate
from openrlhf.algorithms.kl import adapt_kl_coef, corrected_kl_loss, kl_loss
from openrlhf.algorithms.metric_sums import MetricSums
from openrlhf.algorithms.policy_loss import ppo
from openrlhf.algorithms.rollout_correction import correction_weights
from openrlhf.algorithms.value_loss import explained_variance, value_loss
from tests.unit.ragged_rows import bools, checked, f64, numbers, of_each, ragged, randn

NAN = math.nan
KINDS = ("tis", "icepop", "seq-mask-tis")

# --- rollout correction


@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("all_known", [True, False])
@checked(120)
def test_correction_weights_agree_with_their_loop(data, kind, all_known):
    lengths, _, cu, mask = data.draw(ragged())
    total, low, high = sum(lengths), 0.8, 1.25
    old, rollout = (data.draw(numbers(total, 0.6)) for _ in range(2))
    known = bools([True] * total if all_known else data.draw(of_each(total, st.booleans())))
    assume((mask & known).any())
    weights, stats = correction_weights(
        kind,
        torch.where(mask, old, NAN).requires_grad_(),
        torch.where(mask & known, rollout, NAN),
        mask,
        cu,
        low,
        high,
        None if all_known else known,
    )
    expected, applied, raw, touched, gaps = [], [], [], 0, []
    for a, b in zip(cu.tolist()[:-1], cu.tolist()[1:], strict=True):
        judged = [t for t in range(a, b) if mask[t] and known[t]]
        logs = {t: (old[t] - rollout[t]).item() for t in judged}
        row = math.exp(statistics.fmean(logs.values())) if judged else 1.0
        for t in range(a, b):
            if t not in logs:
                expected.append(float(mask[t]))
                continue
            w = math.exp(logs[t])
            if kind == "tis":
                new, hit = min(max(w, low), high), not low <= w <= high
            else:
                hit = not low <= (row if kind == "seq-mask-tis" else w) <= high
                new = 0.0 if hit else w
            expected.append(new)
            applied.append(new)
            raw.append(w)
            gaps.append(-logs[t])
            touched += hit
    assert weights.tolist() == pytest.approx(expected) and not weights.requires_grad
    n = len(applied)
    assert stats.count == n
    assert stats.means() == pytest.approx(
        {"correction_touched": touched / n, "correction_weight": sum(applied) / n, "rollout_minus_old": sum(gaps) / n}
    )
    assert float(stats.maxima["correction_ratio"]) == pytest.approx(max(raw))


def test_the_mismatch_of_the_engine_is_a_metric_of_its_own_beside_ppo_kl():
    new, old, rollout, mask = f64([-0.5, -1.0]), f64([-0.7, -0.6]), f64([-0.9, -0.5]), bools([1, 1])
    _, stats = correction_weights("tis", old, rollout, mask, torch.tensor([0, 2]), 0.5, 2.0)
    assert stats.means()["rollout_minus_old"] == pytest.approx(-0.05)
    assert ppo(new, old, f64([1, 1]), mask, 0.2, 0.2)[1].means()["ppo_kl"] == pytest.approx(0.1)


def test_a_dropped_token_stays_in_the_denominator():
    mask, cu = bools([1, 1]), torch.tensor([0, 2])
    weights, _ = correction_weights("icepop", f64([0.0, 0.0]), f64([0.0, -3.0]), mask, cu, 0.5, 2.0)
    assert weights.tolist() == [1.0, 0.0]
    assert aggregate(f64([1.0, 1.0]) * weights, mask, cu, "token_mean", 2).item() == 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_engine_logprob_shows_unless_it_is_said_to_be_unknown(kind):
    old, rollout, mask, cu = f64([0.0, 0.0]), f64([NAN, -0.1]), bools([1, 1]), torch.tensor([0, 2])
    weights, stats = correction_weights(kind, old, rollout, mask, cu, 0.5, 2.0)
    assert weights.isnan().tolist() == [True, False] and stats.maxima["correction_ratio"].isnan()
    weights, stats = correction_weights(kind, old, rollout, mask, cu, 0.5, 2.0, bools([0, 1]))
    assert weights.tolist() == pytest.approx([1.0, math.exp(0.1)]) and stats.count == 1


@pytest.mark.parametrize(("kind", "expected"), [("tis", 2.0), ("icepop", 0.0), ("seq-mask-tis", 0.0)])
def test_an_overflowing_weight_is_bounded_or_dropped(kind, expected):
    weights, _ = correction_weights(
        kind, torch.tensor([0.0]), torch.tensor([-500.0]), bools([1]), torch.tensor([0, 1]), 0.5, 2.0
    )
    assert weights.tolist() == [expected]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_with_nothing_trained_has_no_weights_and_no_metrics(kind):
    for size in (0, 2):
        nothing = torch.full((size,), NAN)
        weights, stats = correction_weights(
            kind, nothing, nothing, torch.zeros(size).bool(), torch.tensor([0, size]), 0.5, 2.0
        )
        assert weights.tolist() == [0.0] * size and stats.count == 0 and stats.maxima["correction_ratio"] == 0


@pytest.mark.parametrize(
    ("kind", "low", "high", "message"),
    [
        ("mis", 0.5, 2.0, "unknown rollout correction 'mis'; there are tis, icepop, seq-mask-tis"),
        ("tis", 2.0, 0.5, "0 <= low <= high"),
        ("tis", -1.0, 2.0, "0 <= low <= high"),
        ("tis", NAN, 2.0, "0 <= low <= high"),
    ],
)
def test_an_unknown_correction_and_bounds_without_an_inside_are_refused(kind, low, high, message):
    with pytest.raises(ValueError, match=message):
        correction_weights(kind, f64([0.0]), f64([0.0]), bools([1]), torch.tensor([0, 1]), low, high)


def test_maxima_of_shares_are_the_maximum_of_the_whole_and_keep_a_nan():
    shares = [MetricSums({}, 1, {"w": value}) for value in (1.0, torch.tensor(3.0), 2.0)]
    assert float((MetricSums({}, 0) + shares[0] + shares[1] + shares[2]).maxima["w"]) == 3.0
    for pair in ((NAN, 1.0), (1.0, NAN)):
        joined = MetricSums({}, 1, {"w": pair[0]}) + MetricSums({}, 1, {"w": pair[1]})
        assert math.isnan(joined.maxima["w"])


# --- the critic's loss


@given(data=st.data())
@pytest.mark.parametrize("clip", [None, 0.1, 0.7])
@checked(120)
def test_the_value_loss_agrees_with_its_twin_in_value_gradient_and_metrics(data, clip):
    lengths, _, _, mask = data.draw(ragged())
    total = sum(lengths)
    values, old, returns = (data.draw(numbers(total)) for _ in range(3))
    live = torch.where(mask, values, NAN).requires_grad_()
    loss, stats = value_loss(live, torch.where(mask, old, NAN), torch.where(mask, returns, NAN), mask, clip)
    loss.sum().backward()
    twin = values.clone().requires_grad_()
    expected, clipped, trained = [], 0, [t for t in range(total) if mask[t]]
    for t in range(total):
        first = (twin[t] - returns[t]) ** 2
        if not mask[t]:
            expected.append(0 * twin[t])
        elif clip is None:
            expected.append(first / 2)
        else:
            second = (old[t] + (twin[t] - old[t]).clamp(-clip, clip) - returns[t]) ** 2
            clipped += bool(abs(twin[t] - old[t]) > clip and second > first)
            expected.append(torch.maximum(first, second) / 2)
    sum(expected).backward()
    assert loss.tolist() == pytest.approx([x.item() for x in expected], abs=1e-12)
    assert live.grad.tolist() == pytest.approx(twin.grad.tolist(), abs=1e-12)
    means, n = stats.means(), len(trained)
    assert means["value_clip_fraction"] == pytest.approx(clipped / n)
    errors = [(values[t] - returns[t]).item() for t in trained]
    targets = [returns[t].item() for t in trained]
    if len(set(targets)) > 1:
        explained = 1 - statistics.pvariance(errors) / statistics.pvariance(targets)
        assert explained_variance(means) == pytest.approx(explained, abs=1e-6)


def test_the_explained_variance_of_a_step_does_not_depend_on_its_micro_batches():
    values, returns = randn(12, 0), randn(12, 1) + 100
    ones = torch.ones(12).bool()
    _, whole = value_loss(values, values, returns, ones)
    parts = MetricSums({}, 0)
    for part in (slice(0, 5), slice(5, 6), slice(6, 6), slice(6, 12)):
        parts = parts + value_loss(values[part], values[part], returns[part], ones[part])[1]
    assert explained_variance(parts.means()) == pytest.approx(explained_variance(whole.means()))
    perfect = value_loss(returns, returns, returns, ones)[1].means()
    assert explained_variance(perfect) == 1.0
    flat = torch.full((12,), 0.1).double()
    assert math.isnan(explained_variance(value_loss(values, values, flat, ones)[1].means()))


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_a_value_or_a_target_that_is_no_number_shows_at_its_own_token_alone(place, clip):
    tensors = [f64([0.5, 0.5]), f64([0.4, 0.4]), f64([1.0, 1.0])]
    tensors[place][0] = NAN
    tensors[0].requires_grad_()
    loss, _ = value_loss(*tensors, bools([1, 1]), clip)
    loss.sum().backward()
    shows = place != 1 or clip is not None
    assert loss.isnan().tolist() == tensors[0].grad.isnan().tolist() == [shows, False]


def test_a_value_clip_of_zero_is_refused():
    with pytest.raises(ValueError, match="the value clip must be above 0, got 0"):
        value_loss(f64([0.0]), f64([0.0]), f64([0.0]), bools([1]), 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_inside_the_clip_takes_no_gradient_away(dtype):
    values = (randn(2000, 0) / 10).to(dtype).requires_grad_()
    old, returns = values.detach() + (randn(2000, 1) / 100).to(dtype), randn(2000, 2).to(dtype)
    loss, stats = value_loss(values, old, returns, torch.ones(2000).bool(), 0.2)
    loss.sum().backward()
    assert stats.means()["value_clip_fraction"] == 0.0
    torch.testing.assert_close(values.grad, values.detach() - returns)


# --- the KL in the loss


def categorical(seed):
    return torch.log_softmax(randn(6, seed), 0)


def expected_gradient(loss_of):
    """The gradient with respect to the logits, in expectation over tokens that the old policy samples."""
    logits = randn(6, 0).requires_grad_()
    logprobs, old, ref = torch.log_softmax(logits, 0), categorical(1), categorical(2)
    losses = loss_of(logprobs, old, ref)
    value = (old.exp() * losses).sum()
    value.backward()
    return value.item(), logits.grad


def exact_kl():
    logits = randn(6, 0).requires_grad_()
    logprobs, ref = torch.log_softmax(logits, 0), categorical(2)
    kl = (logprobs.exp() * (logprobs - ref)).sum()
    kl.backward()
    return kl.item(), logits.grad


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_corrected_loss_has_the_gradient_of_the_kl_for_samples_of_the_old_policy(estimator):
    mask = torch.ones(6).bool()
    value, gradient = expected_gradient(lambda new, old, ref: corrected_kl_loss(new, old, ref, mask, estimator))
    exact_value, exact_gradient = exact_kl()
    torch.testing.assert_close(gradient, exact_gradient, rtol=1e-9, atol=1e-12)
    if estimator != "k2":
        assert value == pytest.approx(exact_value)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_plain_loss_has_another_gradient_off_policy(estimator):
    mask = torch.ones(6).bool()
    _, gradient = expected_gradient(lambda new, old, ref: kl_loss(new, ref, mask, estimator))
    assert (gradient - exact_kl()[1]).abs().max() > 0.01


@given(data=st.data())
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@checked(120)
def test_the_corrected_loss_agrees_with_its_twin(data, estimator):
    lengths, _, _, mask = data.draw(ragged())
    total = sum(lengths)
    values, old, ref = (data.draw(numbers(total, 3.0)) for _ in range(3))
    live = torch.where(mask, values, NAN).requires_grad_()
    loss = corrected_kl_loss(live, torch.where(mask, old, NAN), torch.where(mask, ref, NAN), mask, estimator)
    loss.sum().backward()
    for t in range(total):
        d, r = (values[t] - ref[t]).item(), math.exp((values[t] - old[t]).item())
        k = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]
        slope = {"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d)}[estimator]
        bounded = abs(k) > 10
        k, slope = max(-10.0, min(10.0, k)), 0.0 if bounded else slope
        gradient = r * slope + (0.0 if estimator == "k2" else r * k)
        assert loss[t].item() == pytest.approx(r * k if mask[t] else 0.0)
        assert live.grad[t].item() == pytest.approx(gradient if mask[t] else 0.0)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("far", [500.0, -500.0])
def test_a_policy_that_ran_away_leaves_a_finite_corrected_loss_and_gradient(estimator, far):
    for old, ref in ((0.0, 0.0), (0.0, far), (far, 0.0)):
        logprobs = torch.tensor([far], requires_grad=True)
        loss = corrected_kl_loss(logprobs, torch.tensor([old]), torch.tensor([ref]), bools([1]), estimator)
        loss.sum().backward()
        assert loss.isfinite().all() and logprobs.grad.isfinite().all()


def test_the_corrected_loss_is_zero_without_a_reference_and_shows_a_nan():
    logprobs = f64([-1.0, -2.0]).requires_grad_()
    assert corrected_kl_loss(logprobs, logprobs, None, bools([1, 1]), "k3").tolist() == [0.0, 0.0]
    for new, old, ref in ((NAN, 0, 0), (0, NAN, 0), (0, 0, NAN)):
        assert corrected_kl_loss(f64([new]), f64([old]), f64([ref]), bools([1]), "k3").isnan().all()


def test_the_coefficient_moves_by_at_most_a_fifth_of_the_share_of_the_horizon():
    for kl, factor in ((3.0, -0.2), (5.4, -0.1), (6.0, 0.0), (6.6, 0.1), (60.0, 0.2), (-4.0, -0.2)):
        assert adapt_kl_coef(0.1, kl, 6.0, 256, 10_000) == pytest.approx(0.1 * (1 + factor * 256 / 10_000))


@pytest.mark.parametrize(
    ("kl", "target", "samples", "horizon", "message"),
    [
        (NAN, 6.0, 256, 10_000, "cannot adapt to a KL of nan"),
        (math.inf, 6.0, 256, 10_000, "cannot adapt to a KL of inf"),
        (1.0, 0.0, 256, 10_000, "must be above 0, got 0.0 and 10000"),
        (1.0, 6.0, 256, 0, "must be above 0, got 6.0 and 0"),
        (1.0, 6.0, 5_000, 1_000, "5000 samples a step are too many for a KL horizon of 1000: take one above 1000"),
    ],
)
def test_a_coefficient_that_cannot_adapt_is_refused(kl, target, samples, horizon, message):
    with pytest.raises(ValueError, match=message):
        adapt_kl_coef(0.1, kl, target, samples, horizon)
