"""Rewards turn by turn, a critic's values, the shaping of rewards, and what is kept and counted of a rollout."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.algorithms.advantages import ESTIMATORS, AdvantageInputs, compute_advantages
from openrlhf.algorithms.evaluation import best_of_k, mean_best_of_k
from openrlhf.algorithms.filtering import keep_groups
from openrlhf.algorithms.shaping import overlong_penalty, stop_properly
from openrlhf.algorithms.token_returns import generalized_advantages
from tests.unit.ragged_rows import bools, checked, f64, numbers, per_row, ragged

NAN = math.nan

# --- a critic and GAE


def one_row(mask, rewards=1.0, **options):
    n = len(mask)
    return AdvantageInputs(
        f64([rewards]), bools([1]), torch.tensor([0]), bools(mask), torch.tensor([0, n]), whiten_std=False, **options
    )


@given(data=st.data())
@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (1.0, 0.0), (0.9, 0.7)])
@checked(100)
def test_generalized_advantages_agree_with_the_sum_of_their_definition(data, gamma, lambd):
    lengths, rows, cu, mask = data.draw(ragged())
    rewards, values = (data.draw(numbers(sum(lengths))) for _ in range(2))
    advantages, returns = generalized_advantages(
        torch.where(mask, rewards, NAN), torch.where(mask, values, NAN), mask, cu, gamma, lambd
    )
    expected = []
    for row, rs, vs in zip(rows, per_row(rewards, lengths), per_row(values, lengths), strict=True):
        trained = [t for t, m in enumerate(row) if m]
        deltas = []
        for place, t in enumerate(trained):
            following = vs[trained[place + 1]] if place + 1 < len(trained) else 0.0
            deltas.append(rs[t] + gamma * following - vs[t])
        sums = {
            t: sum((gamma * lambd) ** i * delta for i, delta in enumerate(deltas[place:]))
            for place, t in enumerate(trained)
        }
        expected += [(sums[t], sums[t] + vs[t]) if t in sums else (0.0, 0.0) for t in range(len(row))]
    assert advantages.tolist() == pytest.approx([a for a, _ in expected], abs=1e-12)
    assert returns.tolist() == pytest.approx([r for _, r in expected], abs=1e-12)


def test_a_critic_that_is_read_at_the_token_itself_gives_other_advantages():
    # The head's outputs after each of four tokens, of which the policy produced the last three.
    head, mask, cu = f64([0.1, 0.2, 0.4, 0.8]), bools([0, 1, 1, 1]), torch.tensor([0, 4])
    rewards = f64([0, 0, 0, 1])
    before = torch.cat([f64([0.0]), head[:-1]])
    right, _ = generalized_advantages(rewards, before, mask, cu, 1.0, 0.0)
    assert right.tolist() == pytest.approx([0, 0.1, 0.2, 0.6])
    wrong, _ = generalized_advantages(rewards, head, mask, cu, 1.0, 0.0)
    assert wrong.tolist() == pytest.approx([0, 0.2, 0.4, 0.2])


def test_a_value_that_is_not_a_number_shows_in_its_own_row_alone():
    values, mask, cu = f64([0.5, 0.5, NAN, 0.5]), bools([1, 1, 1, 1]), torch.tensor([0, 2, 4])
    advantages, _ = generalized_advantages(torch.zeros(4).double(), values, mask, cu, 1.0, 1.0)
    assert advantages.isnan().tolist() == [False, False, True, False]


def test_returns_for_the_critic_are_not_whitened_while_its_advantages_are():
    inputs = AdvantageInputs(
        f64([3.0, 1.0]),
        bools([1, 1]),
        torch.tensor([0, 1]),
        bools([1, 1]),
        torch.tensor([0, 1, 2]),
        values=f64([0.5, 1.5]),
    )
    advantages, returns = compute_advantages("gae", inputs)
    assert returns.tolist() == [3.0, 1.0] and advantages.tolist() == pytest.approx([1.0, -1.0])
    centred, same = compute_advantages("gae", replace(inputs, whiten_std=False))
    assert same.tolist() == [3.0, 1.0] and centred.tolist() == pytest.approx([1.5, -1.5])


def test_gae_without_a_critic_is_refused():
    with pytest.raises(ValueError, match="the advantage estimator gae needs the values of a critic"):
        compute_advantages("gae", one_row([1, 1]))


def test_values_of_another_size_are_refused():
    with pytest.raises(ValueError, match="values has 3 entries, cu_seqlens asks for 2"):
        one_row([1, 1], values=f64([0, 0, 0]))


# --- OPO


def test_the_length_weighted_baseline_counts_tokens_of_the_policy_alone():
    inputs = AdvantageInputs(
        f64([1.0, 0.0, NAN]),
        bools([1, 1, 0]),
        torch.tensor([0, 0, 0]),
        bools([0, 1, 0, 0, 1, 1, 1, 1, 1]),
        torch.tensor([0, 4, 7, 9]),
    )
    advantages, _ = compute_advantages("opo", inputs)
    assert advantages.tolist() == pytest.approx([0, 0.75, 0, 0, -0.25, -0.25, -0.25, 0, 0])


# --- rewards turn by turn


def test_a_reward_of_a_turn_reaches_its_own_turn_and_those_before_it():
    inputs = one_row([0, 1, 1, 0, 1], 3.0, token_rewards=f64([NAN, 0, 1, NAN, 2]), gamma=0.5)
    assert compute_advantages("reinforce", inputs)[1].tolist() == [0, 1.0, 2.0, 0, 2.0]
    terminal = compute_advantages("reinforce", replace(inputs, token_rewards=None))[1]
    assert terminal.tolist() == [0, 0.75, 1.5, 0, 3.0]
    valued = replace(inputs, values=f64([0, 0.5, 0.5, 0, 0.5]), lambd=1.0)
    assert compute_advantages("gae", valued)[1].tolist() == [0, 1.0, 2.0, 0, 2.0]


def test_estimators_with_a_group_baseline_compare_outcomes_and_not_turns():
    mask, cu = bools([1, 1, 1, 1]), torch.tensor([0, 2, 4])
    inputs = AdvantageInputs(f64([1.0, 0.0]), bools([1, 1]), torch.tensor([0, 0]), mask, cu, values=f64([0, 0, 0, 0]))
    turns = replace(inputs, token_rewards=f64([0.75, 0.25, 0.5, -0.5]))
    for name in ESTIMATORS:
        same = torch.equal(compute_advantages(name, inputs)[1], compute_advantages(name, turns)[1])
        assert same is (name not in ("gae", "reinforce"))


def test_rewards_of_turns_are_clipped_one_by_one_and_make_none_where_there_was_none():
    inputs = one_row([1, 1, 1], 7.0, token_rewards=f64([5, 0, 2]), reward_clip=(1.0, 3.0))
    assert compute_advantages("reinforce", inputs)[1].tolist() == [5.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("mask", "token_rewards"),
    [([1, 1, 1], [1.0, 0.0, 1.0]), ([1, 1, 0], [1.0, 0.0, 2.0]), ([1, 1, 1], [NAN, 0.0, 3.0])],
    ids=["another sum", "a reward at a token of the environment", "not a number"],
)
def test_rewards_of_turns_that_do_not_sum_to_the_reward_are_refused(mask, token_rewards):
    with pytest.raises(
        ValueError, match=r"the token rewards of trajectories \[0\] sum to .*, their rewards are \[3.0\]"
    ):
        one_row(mask, 3.0, token_rewards=f64(token_rewards))


def test_rewards_of_turns_need_no_place_where_nothing_is_trained():
    inputs = one_row([0, 0], 3.0, token_rewards=f64([0, 0]))
    assert compute_advantages("reinforce", inputs)[1].tolist() == [0, 0]


# --- shaping


def test_the_overlong_penalty_agrees_with_its_loop():
    lengths = list(range(0, 61))
    for buffer, factor in ((10, 1.0), (25, 0.3), (50, 2.0)):
        expected = []
        for length in lengths:
            start = 50 - buffer
            share = 0.0 if length <= start else 1.0 if length >= 50 else (length - start) / buffer
            expected.append(-factor * share)
        assert overlong_penalty(torch.tensor(lengths), 50, buffer, factor).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("buffer", "factor"), [(0, 1.0), (101, 1.0), (NAN, 1.0), (10, -1.0), (10, NAN)])
def test_an_overlong_buffer_or_factor_outside_its_range_is_refused(buffer, factor):
    with pytest.raises(ValueError, match="overlong"):
        overlong_penalty(torch.tensor([5]), 100, buffer, factor)


def test_a_truncated_sample_without_a_reward_gets_none():
    for coef in (0.0, 0.5, -1.0):
        rewards = stop_properly(f64([NAN, 2.0, 2.0]), bools([1, 1, 0]), coef)
        assert rewards.isnan().tolist() == [True, False, False]
        assert rewards[1:].tolist() == [-1.0 if coef < 0 else 2.0 * coef, 2.0]


@pytest.mark.parametrize("coef", [1.5, NAN])
def test_a_coefficient_for_truncated_samples_above_one_is_refused(coef):
    with pytest.raises(ValueError, match="stop-properly penalty must be at most 1"):
        stop_properly(f64([1.0]), bools([1]), coef)


# --- dynamic filtering


def test_groups_of_equal_scores_go_even_where_their_mean_is_inside_the_range():
    groups = [[0.5] * 4, [0, 1, 0, 1], [1] * 4, [0.2, 0.4, 0.2, 0.4], [0] * 4]
    order = list(range(20))
    random.Random(0).shuffle(order)
    scores = f64([float(x) for group in groups for x in group])[order]
    ids = torch.arange(5).repeat_interleave(4)[order]
    keep, pass_rate = keep_groups(scores, torch.ones(20).bool(), ids, 0.0, 1.0)
    assert set(ids[keep].tolist()) == {1, 3} and int(keep.sum()) == 8
    assert pass_rate == 0.4


def test_the_bounds_of_the_range_are_excluded():
    scores, ids = f64([0.25, 0.75, 0.5, 1.0]), torch.tensor([0, 0, 1, 1])
    for low, high, kept in ((0.5, 1.0, {1}), (0.0, 0.75, {0}), (0.5, 0.75, set())):
        keep, _ = keep_groups(scores, torch.ones(4).bool(), ids, low, high)
        assert set(ids[keep].tolist()) == kept


def test_a_sample_without_a_score_is_in_no_mean_and_does_not_stay():
    scores, ids = f64([1.0, 0.0, NAN, 1.0, NAN]), torch.tensor([7, 7, 7, 3, 3])
    keep, pass_rate = keep_groups(scores, bools([1, 1, 0, 1, 0]), ids, 0.0, 1.0)
    assert keep.tolist() == [True, True, False, False, False]
    assert pass_rate == 0.5
    _, of_none = keep_groups(f64([]), bools([]), torch.tensor([], dtype=torch.long), 0.0, 1.0)
    assert math.isnan(of_none)


def test_an_empty_range_and_a_score_that_is_no_number_are_refused():
    with pytest.raises(ValueError, match=r"the range of dynamic filtering \(1.0, 1.0\) is empty"):
        keep_groups(f64([0.5]), bools([1]), torch.tensor([0]), 1.0, 1.0)
    with pytest.raises(ValueError, match=r"trajectories \[1\] are marked as scored"):
        keep_groups(f64([0.5, NAN]), bools([1, 1]), torch.tensor([0, 0]), 0.0, 1.0)


# --- evaluation


@given(st.lists(st.sampled_from([0.0, 0.3, 1.0, -2.0]), min_size=1, max_size=7))
@checked(100)
def test_the_best_of_k_is_the_mean_over_all_draws(scores):
    n = len(scores)
    for k in range(1, n + 1):
        draws = [max(draw) for draw in itertools.combinations(scores, k)]
        assert best_of_k(scores, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)
    correct = [float(score > 0) for score in scores]
    for k in range(1, n + 1):
        none_of_k = math.comb(correct.count(0.0), k) / math.comb(n, k)
        assert best_of_k(correct, k) == pytest.approx(1 - none_of_k, abs=1e-12)


def test_pass_at_k_of_many_samples_neither_overflows_nor_cancels():
    assert best_of_k([1.0] + [0.0] * 99_999, 1) == pytest.approx(1e-5, rel=1e-12)
    assert best_of_k([0.0] * 9_999 + [1.0], 5_000) == pytest.approx(0.5, rel=1e-12)


def test_evaluation_uses_its_own_number_of_samples_and_counts_each_k_once():
    assert mean_best_of_k([[1, 0, 0, 0], [0, 0, 0, 0]], (1, 4)) == {1: 0.125, 4: 0.5}
    assert mean_best_of_k([[1], [0]], (1, 1)) == {1: 0.5}
    assert math.isnan(mean_best_of_k([], (1,))[1])


def test_a_k_above_the_number_of_samples_is_refused_with_the_prompts_place():
    for k in (5, 0):
        with pytest.raises(ValueError, match="of 4 samples cannot be drawn"):
            best_of_k([1.0] * 4, k)
    with pytest.raises(ValueError, match="prompt 1: k = 2 of 1 samples cannot be drawn"):
        mean_best_of_k([[1.0, 0.0], [1.0]], (2,))
    with pytest.raises(ValueError, match="a score of nan cannot be ranked"):
        best_of_k([1.0, NAN], 1)
