"""Hand-made cases: faults that users of RLHF code met, with the right value of each."""

import math
from dataclasses import replace

import pytest
import torch

from openrlhf.algorithms.advantages import (
    ESTIMATORS,
    AdvantageInputs,
    compute_advantages,
    group_baseline,
    group_norm,
    leave_one_out,
    length_weighted_baseline,
    register_estimator,
)
from openrlhf.algorithms.aggregate import aggregate, count_nonempty, count_tokens, count_units
from openrlhf.algorithms.kl import kl_loss, kl_per_token
from openrlhf.algorithms.policy_loss import MetricSums, ppo
from openrlhf.algorithms.shaping import clip_rewards
from openrlhf.algorithms.token_returns import reward_to_go, terminal_rewards, whiten
from tests.unit.ragged_rows import bools, f64

NAN = float("nan")


def one_token_each(rewards, groups, scored=None, **options):
    """Trajectories of one trained token, so that an advantage is one number."""
    n = len(rewards)
    return AdvantageInputs(
        rewards=f64(rewards),
        scored=bools([True] * n if scored is None else scored),
        group_ids=torch.tensor(groups),
        mask=torch.ones(n, dtype=torch.bool),
        cu_seqlens=torch.arange(n + 1),
        **{"values": torch.zeros(n, dtype=torch.float64), **options},
    )


# --- aggregation


@pytest.mark.parametrize(
    ("mode", "rank_values", "total"),
    [("token_mean", [2.666667, 3.0], 2.833333), ("seq_mean", [None, None], 3.277778)],
)
def test_the_loss_does_not_depend_on_how_rows_are_split_over_ranks(mode, rank_values, total):
    ranks = [
        (f64([0.5, 1.5, 2, 0, 4, 0, 0, 0]), bools([1, 1, 1, 0, 1, 0, 0, 0]), torch.tensor([0, 4, 8])),
        (f64([6, 3, 0, 0]), bools([1, 1, 0, 0]), torch.tensor([0, 4])),
    ]
    denominator = sum(int(count_units(mask, cu, mode)) for _, mask, cu in ranks)
    shares = [aggregate(loss, mask, cu, mode, denominator) for loss, mask, cu in ranks]
    assert sum(shares).item() == pytest.approx(total, abs=1e-6)
    for share, expected in zip(shares, rank_values, strict=True):
        if expected is not None:
            assert 2 * share.item() == pytest.approx(expected, abs=1e-6)
    whole = aggregate(
        torch.cat([r[0] for r in ranks]),
        torch.cat([r[1] for r in ranks]),
        torch.tensor([0, 4, 8, 12]),
        mode,
        denominator,
    )
    assert whole.item() == pytest.approx(total, abs=1e-6)


def test_a_row_with_no_trained_token_is_in_neither_sum_nor_count():
    loss, mask, cu = f64([2, 4, 0, 9, 9, 9]), bools([1, 1, 0, 0, 0, 0]), torch.tensor([0, 3, 6])
    assert count_nonempty(mask, cu) == 1
    assert aggregate(loss, mask, cu, "seq_mean", int(count_nonempty(mask, cu))).item() == 3.0


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean", "constant"])
@pytest.mark.parametrize("denominator", [0, 7])
def test_a_batch_with_nothing_to_train_gives_a_finite_zero_with_a_gradient(mode, denominator):
    loss = f64([2, NAN, 0]).requires_grad_()
    value = aggregate(loss, bools([0, 0, 0]), torch.tensor([0, 3]), mode, denominator)
    value.backward()
    assert value.item() == 0.0
    assert loss.grad.tolist() == [0.0, 0.0, 0.0]


def test_trained_tokens_over_a_denominator_of_zero_are_refused():
    with pytest.raises(ValueError, match="token_mean over a denominator of 0"):
        aggregate(f64([1.0]), bools([1]), torch.tensor([0, 1]), "token_mean", 0)


def test_an_unknown_aggregation_and_a_constant_of_zero_are_refused():
    with pytest.raises(ValueError, match="unknown loss aggregation 'mean'"):
        aggregate(f64([1.0]), bools([1]), torch.tensor([0, 1]), "mean", 1)
    with pytest.raises(ValueError, match="must be above 0"):
        aggregate(f64([1.0]), bools([1]), torch.tensor([0, 1]), "constant", 1, 0.0)


def test_the_constant_counts_trajectories_without_pad_rows():
    mask, cu = bools([1, 1, 0, 0, 0]), torch.tensor([0, 2, 3, 5])
    assert count_units(mask, cu, "constant") == 3
    assert count_units(mask, cu, "constant", pad_rows=1) == 2
    assert aggregate(f64([3, 5, 0, 0, 0]), mask, cu, "constant", 2, 4.0).item() == 1.0


def test_a_trajectory_of_two_rows_counts_once_in_the_sequence_mean():
    loss, mask, rows = f64([1, 2, 6]), bools([1, 1, 1]), torch.tensor([0, 2, 3])
    split = aggregate(loss, mask, rows, "seq_mean", 1, row_tokens=torch.tensor([3, 3]))
    assert split.item() == aggregate(loss, mask, torch.tensor([0, 3]), "seq_mean", 1).item() == 3.0


def test_nan_has_no_effect_where_nothing_is_trained_and_shows_where_something_is():
    for mode in ("token_mean", "seq_mean", "constant"):
        loss = f64([1, NAN, 3]).requires_grad_()
        value = aggregate(loss, bools([1, 0, 1]), torch.tensor([0, 3]), mode, 2)
        value.backward()
        assert math.isfinite(value.item()) and loss.grad.isfinite().all() and loss.grad[1] == 0
        assert aggregate(loss, bools([1, 1, 1]), torch.tensor([0, 3]), mode, 2).isnan()


# --- policy loss


def test_nan_in_an_ignored_old_logprob_does_not_reach_the_loss():
    logprobs = f64([-0.5, -0.7, 0.0]).requires_grad_()
    mask = bools([1, 1, 0])
    loss, stats = ppo(logprobs, f64([-0.4, -0.9, NAN]), f64([1.0, -2.0, 3.0]), mask, 0.2, 0.2)
    total = aggregate(loss, mask, torch.tensor([0, 3]), "token_mean", int(count_tokens(mask)))
    total.backward()
    assert loss.tolist() == pytest.approx([-0.904837, 2.442806, 0.0], abs=1e-6)
    assert total.item() == pytest.approx(0.768984, abs=1e-6)
    assert stats.means()["ppo_kl"] == pytest.approx(-0.05, abs=1e-9)
    assert logprobs.grad.isfinite().all() and logprobs.grad[2] == 0


@pytest.mark.parametrize("where", ["logprobs", "old_logprobs", "advantages"])
def test_nan_at_a_trained_token_shows_in_value_and_gradient(where):
    tensors = {"logprobs": f64([-0.5, -0.7]), "old_logprobs": f64([-0.5, -0.7]), "advantages": f64([1.0, -1.0])}
    tensors[where][0] = NAN
    tensors["logprobs"].requires_grad_()
    loss, _ = ppo(**tensors, mask=bools([1, 1]), clip_low=0.2, clip_high=0.2)
    loss.sum().backward()
    assert loss[0].isnan() and tensors["logprobs"].grad[0].isnan()
    assert loss[1].item() == 1.0


def test_ppo_kl_is_the_mean_of_old_minus_new_and_is_never_clamped():
    mask = bools([1, 1])
    logprobs = f64([-0.5, -1.0]).requires_grad_()
    _, stats = ppo(logprobs, f64([-0.7, -0.6]), f64([1, 1]), mask, 0.2, 0.2)
    assert stats.means()["ppo_kl"] == pytest.approx(0.1, abs=1e-9)
    assert not any(torch.as_tensor(value).requires_grad for value in stats.sums.values())
    _, stats = ppo(f64([0.0]), f64([-100.0]), f64([1]), bools([1]), 0.2, 0.2)
    assert stats.means()["ppo_kl"] == -100.0


@pytest.mark.parametrize(("advantage", "expected"), [(1.0, -1.2), (0.0, 0.0)])
def test_an_overflowing_ratio_that_the_clip_removes_leaves_a_finite_gradient(advantage, expected):
    logprobs = torch.tensor([0.0, -0.3], requires_grad=True)
    loss, _ = ppo(logprobs, torch.tensor([-200.0, -0.3]), torch.tensor([advantage, 1.0]), bools([1, 1]), 0.2, 0.2)
    loss.sum().backward()
    assert loss[0].item() == pytest.approx(expected)
    assert logprobs.grad.tolist() == [0.0, -1.0]


def test_dual_clip_bounds_the_loss_of_an_overflowing_ratio_and_its_gradient():
    logprobs = torch.tensor([0.0], requires_grad=True)
    loss, _ = ppo(logprobs, torch.tensor([-200.0]), torch.tensor([-2.0]), bools([1]), 0.2, 0.2, dual_clip=3.0)
    loss.sum().backward()
    assert loss.tolist() == [6.0] and logprobs.grad.tolist() == [0.0]


def test_a_dual_clip_of_one_is_refused():
    with pytest.raises(ValueError, match="dual clip must be above 1"):
        ppo(f64([0.0]), f64([0.0]), f64([1.0]), bools([1]), 0.2, 0.2, dual_clip=1.0)


def test_on_policy_the_ratio_is_one_and_the_gradient_is_minus_the_advantage():
    logprobs = f64([-0.5, -2.0]).requires_grad_()
    loss, stats = ppo(logprobs, logprobs.detach().clone(), f64([1.5, -0.5]), bools([1, 1]), 0.2, 0.2)
    loss.sum().backward()
    assert logprobs.grad.tolist() == [-1.5, 0.5]
    assert stats.means() == {"ppo_kl": 0.0, "clip_fraction": 0.0, "ratio_mean": 1.0}


def test_the_clip_fraction_counts_tokens_that_lost_their_gradient():
    logprobs = f64([0.5, 0.5, -0.5, -0.5, 0.5]).requires_grad_()
    loss, stats = ppo(logprobs, torch.zeros_like(logprobs), f64([1, -1, 1, -1, 0]), bools([1] * 5), 0.2, 0.2)
    loss.sum().backward()
    assert [g == 0 for g in logprobs.grad.tolist()] == [True, False, False, True, True]
    assert stats.means()["clip_fraction"] == pytest.approx(2 / 5)


def test_sums_of_shares_give_the_means_of_the_whole():
    whole = MetricSums({"a": 6.0, "b": 3.0}, 3)
    assert (MetricSums({"a": 1.0}, 1) + MetricSums({"a": 5.0, "b": 3.0}, 2)).means() == whole.means()
    assert math.isnan(MetricSums({"a": 0.0}, 0).means()["a"])


# --- KL


def test_a_k3_that_is_clamped_has_a_zero_gradient_and_not_nan():
    logprobs = torch.tensor([-101.0, -1.5, -0.5], requires_grad=True)
    kl = kl_per_token(logprobs, torch.tensor([-1.0, -1.0, -1.0]), bools([1, 1, 1]), "k3")
    kl.sum().backward()
    assert kl.tolist() == pytest.approx([10.0, 0.148721, 0.106531], abs=1e-5)
    assert logprobs.grad.tolist() == pytest.approx([0.0, -0.648721, 0.393469], abs=1e-5)


@pytest.mark.parametrize(("estimator", "expected"), [("k1", [-10, 10]), ("k2", [10, 10]), ("k3", [10, 10])])
def test_every_estimator_is_clamped_to_ten(estimator, expected):
    logprobs = torch.tensor([-101.0, 100.0], requires_grad=True)
    kl = kl_per_token(logprobs, torch.zeros(2), bools([1, 1]), estimator)
    kl.sum().backward()
    assert kl.tolist() == expected and logprobs.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_ignores_nan_outside_the_mask_and_shows_it_inside(estimator):
    logprobs = f64([-1.0, NAN, -1.0]).requires_grad_()
    kl = kl_per_token(logprobs, f64([-1.2, -1.0, NAN]), bools([1, 0, 0]), estimator)
    kl.sum().backward()
    assert kl.isfinite().all() and logprobs.grad.isfinite().all()
    assert kl_per_token(logprobs, f64([-1.2, -1.0, NAN]), bools([1, 1, 1]), estimator).isnan().tolist() == [
        False,
        True,
        True,
    ]


def test_k1_is_refused_in_the_loss_and_an_unknown_estimator_everywhere():
    with pytest.raises(ValueError, match="expected gradient of zero"):
        kl_loss(f64([0.0]), f64([0.0]), bools([1]), "k1")
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'"):
        kl_per_token(f64([0.0]), f64([0.0]), bools([1]), "k4")


def test_without_a_reference_model_the_kl_and_its_loss_are_zero():
    logprobs, mask = f64([-1.0, -2.0]).requires_grad_(), bools([1, 1])
    assert kl_per_token(logprobs, None, mask, "k1").tolist() == [0.0, 0.0]
    term = aggregate(kl_loss(logprobs, None, mask, "k3"), mask, torch.tensor([0, 2]), "token_mean", 2)
    assert 0.25 + 0.0 * term.item() == 0.25
    inputs = one_token_each([1.0, 0.0], [0, 0], kl=None, kl_coef=0.0)
    assert compute_advantages("dr_grpo", inputs)[0].tolist() == [0.5, -0.5]


# --- advantages


def test_group_statistics_belong_to_one_prompt_in_any_order_of_arrival():
    by_prompt = {"A": [1, 0, 0, 1], "B": [1, 1, 1, 0]}
    arrival = ["B3", "A0", "A1", "B0", "B1", "A2", "A3", "B2"]
    inputs = one_token_each([by_prompt[a[0]][int(a[1])] for a in arrival], [{"A": 7, "B": 3}[a[0]] for a in arrival])
    third, tenth = 2 / 3, 0.866025
    expected = {
        group_baseline: {"A": [0.5, -0.5, -0.5, 0.5], "B": [0.25, 0.25, 0.25, -0.75]},
        leave_one_out: {"A": [third, -third, -third, third], "B": [1 / 3, 1 / 3, 1 / 3, -1]},
        group_norm: {"A": [tenth, -tenth, -tenth, tenth], "B": [0.5, 0.5, 0.5, -1.5]},
    }
    for estimate, values in expected.items():
        assert estimate(inputs).tolist() == pytest.approx([values[a[0]][int(a[1])] for a in arrival], abs=1e-6)


@pytest.mark.parametrize("missing", [NAN, 0.0, 99.0])
def test_a_sample_without_a_reward_is_in_no_statistic_and_has_no_advantage(missing):
    inputs = one_token_each([1.0, missing, 0.0, 1.0], [0] * 4, scored=[1, 0, 1, 1])
    assert group_baseline(inputs).tolist() == pytest.approx([1 / 3, 0.0, -2 / 3, 1 / 3])
    for name in ESTIMATORS:
        advantages, returns = compute_advantages(name, inputs)
        three, _ = compute_advantages(name, one_token_each([1.0, 0.0, 1.0], [0] * 3))
        assert advantages[[0, 2, 3]].tolist() == three.tolist()
        assert advantages[1] == returns[1] == 0


def test_a_scored_sample_whose_reward_is_not_a_number_is_refused_by_its_place():
    with pytest.raises(ValueError, match=r"trajectories \[1\] are marked as scored"):
        one_token_each([1.0, NAN], [0, 0])


@pytest.mark.parametrize("estimate", [group_baseline, leave_one_out, group_norm, length_weighted_baseline])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(estimate):
    for size in range(1, 12):
        for value in (0.1, 1 / 3, 1e6 + 0.7):
            inputs = one_token_each([value] * size + [0.3], [0] * size + [1])
            assert estimate(inputs).tolist() == [0.0] * (size + 1)


@pytest.mark.parametrize("name", ["rloo", "group_norm", "dr_grpo", "opo", "reinforce_baseline"])
def test_a_batch_that_teaches_nothing_has_no_advantage(name):
    assert compute_advantages(name, one_token_each([0.1] * 7, [0] * 4 + [1] * 3))[0].tolist() == [0.0] * 7


@pytest.mark.parametrize(("gamma", "expected"), [(1.0, [1, 1, 0, 0, 1, 1]), (0.5, [0.125, 0.25, 0, 0, 0.5, 1.0])])
def test_reward_to_go_passes_over_tokens_of_the_environment(gamma, expected):
    mask = bools([1, 1, 0, 0, 1, 1])
    assert reward_to_go(f64([0, 0, 0, 0, 0, 1]), mask, torch.tensor([0, 6]), gamma).tolist() == expected


def test_what_stands_at_tokens_of_the_environment_is_no_reward():
    mask = bools([1, 0, 1])
    assert reward_to_go(f64([1, NAN, 2]), mask, torch.tensor([0, 3]), 1.0).tolist() == [3.0, 0.0, 2.0]


def test_the_terminal_reward_stands_on_the_last_token_of_the_policy():
    mask, cu = bools([0, 1, 1, 0, 0, 0, 0, 1]), torch.tensor([0, 4, 6, 8])
    assert terminal_rewards(f64([5, 6, 7]), mask, cu).tolist() == [0, 0, 5, 0, 0, 0, 0, 7]


def test_the_kl_is_taken_from_the_reward_of_every_estimator():
    for name in ESTIMATORS:
        inputs = AdvantageInputs(
            rewards=f64([1.0, 0.0]),
            scored=bools([1, 1]),
            group_ids=torch.tensor([0, 0]),
            mask=bools([0, 1, 1, 0, 1]),
            cu_seqlens=torch.tensor([0, 3, 5]),
            kl=f64([NAN, 0.5, 1.0, NAN, -2.0]),
            kl_coef=0.1,
            values=f64([NAN, 0.0, 0.0, NAN, 0.0]),
        )
        _, with_kl = compute_advantages(name, inputs)
        _, without = compute_advantages(name, replace(inputs, kl=None))
        assert (with_kl - without).tolist() == pytest.approx([0, -0.15, -0.1, 0, 0.2])


def test_the_reward_is_clipped_after_the_group_baseline():
    inputs = one_token_each([100.0, 90.0], [0, 0], reward_clip=(-1.0, 1.0))
    assert compute_advantages("dr_grpo", inputs)[0].tolist() == [1.0, -1.0]
    assert compute_advantages("reinforce", inputs)[1].tolist() == [1.0, 1.0]
    assert clip_rewards(f64([-3, 0.5]), None).tolist() == [-3, 0.5]
    with pytest.raises(ValueError, match="is empty"):
        clip_rewards(f64([0.0]), (1.0, -1.0))


def test_only_gae_and_reinforce_and_its_baseline_form_are_whitened():
    inputs = one_token_each([3.0, 1.0, 0.0, 0.0], [0, 0, 1, 1])
    for name in ESTIMATORS:
        whitened = name in ("gae", "reinforce", "reinforce_baseline")
        advantages, returns = compute_advantages(name, inputs)
        assert torch.equal(advantages, returns) is not bool(whitened)
        if whitened:
            assert advantages.mean().item() == pytest.approx(0) and advantages.var(
                unbiased=False
            ).item() == pytest.approx(1)


def test_whitening_has_a_floor_for_the_variance_and_a_mean_only_form():
    mask = bools([1, 1, 0])
    assert whiten(f64([2, 2, NAN]), mask).tolist() == [0, 0, 0]
    assert whiten(f64([1e-6, -1e-6, 0]), mask)[0].item() == pytest.approx(1e-6 / 1e-4)
    assert whiten(f64([3, 1, NAN]), mask, std=False).tolist() == [1, -1, 0]
    assert whiten(f64([3, 1, NAN]), bools([0, 0, 0])).tolist() == [0, 0, 0]


def test_a_trajectory_without_a_token_of_the_policy_is_harmless():
    for name in ESTIMATORS:
        inputs = AdvantageInputs(
            f64([1.0, 0.0]),
            bools([1, 1]),
            torch.tensor([0, 0]),
            bools([0, 0, 0, 1]),
            torch.tensor([0, 2, 4]),
            values=f64([NAN, NAN, NAN, 0.5]),
        )
        advantages, _ = compute_advantages(name, inputs)
        assert advantages.isfinite().all() and advantages[:3].tolist() == [0, 0, 0]


def test_the_registry_refuses_a_second_entry_and_an_unknown_name():
    with pytest.raises(ValueError, match="the advantage estimator 'rloo' exists already"):
        register_estimator("rloo")(lambda inputs: (inputs.rewards, inputs.rewards))
    with pytest.raises(ValueError, match="unknown advantage estimator 'ppo'"):
        compute_advantages("ppo", one_token_each([1.0], [0]))
    assert set(ESTIMATORS) == {"gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo", "opo"}


def test_inputs_of_different_sizes_are_refused():
    with pytest.raises(ValueError, match="group_ids has 1 entries, cu_seqlens asks for 2"):
        one_token_each([1.0, 2.0], [0])
