"""From trajectories to advantages: where rewards stand, what equal ones teach, and how the KL coefficient moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.algorithms.kl import adapt_kl_coef
from openrlhf.backends.base import TokenScores
from openrlhf.config import AdvantageConfig, AlgoConfig, KLConfig
from openrlhf.config.algo import GROUP_ESTIMATORS, WHITENING_ESTIMATORS
from openrlhf.data.trajectory import Segment, Trajectory
from openrlhf.trainer import rl_specs
from openrlhf.trainer.controller import LoopSettings, RLController, trainable
from openrlhf.trainer.experience import (
    Budget,
    Experience,
    RewardShaping,
    add_advantages,
    add_correction,
    build_experience,
)
from openrlhf.trainer.placement import colocated_roles, role_sizes
from openrlhf.trainer.policy_update import PolicyLossSpec, policy_loss
from openrlhf.trainer.rl_metrics import StepMetrics
from tests.unit.config_args import built

WIDE = (-1e9, 1e9)
LOSS = PolicyLossSpec("ppo", 0.2, 0.2, None, "token_mean", 1.0, None, 1.0)
PLAIN = RewardShaping(WIDE)


def algo_of(estimator: str, *, gamma: float = 1.0, kl: KLConfig | None = None, no_std_norm: bool = False) -> AlgoConfig:
    advantage = AdvantageConfig(estimator=estimator, gamma=gamma, no_std_norm=no_std_norm)
    return AlgoConfig(advantage=advantage, kl=kl or KLConfig(init_coef=0.0))


def sample(
    group: int,
    index: int,
    ranges: list[list[tuple[int, int]]],
    reward: float,
    steps: list[float] | None = None,
    **more: Any,
) -> Trajectory:
    """One trajectory; each of its segments is as long as its last action range and one token of the environment."""
    segments = [Segment(list(range(1, 2 + parts[-1][1])), parts) for parts in ranges]
    return Trajectory(group, index, "p", None, segments, reward, None, reward, steps, **more)


def prepared(trajectories: list[Trajectory]) -> Experience:
    experience = build_experience(trajectories)
    total = experience.batch.tokens.numel()
    experience.batch.token_fields["old_logprobs"] = torch.zeros(total)
    experience.batch.token_fields["old_values"] = torch.zeros(total)
    return experience


def rewards_by_token(trajectories: list[Trajectory], shaping: RewardShaping = PLAIN) -> list[float]:
    """With a discount of 0 the return of a token is the reward that stands on it."""
    experience = prepared(trajectories)
    add_advantages(experience, algo_of("reinforce", gamma=0.0), shaping, 0.0)
    return experience.batch.token_fields["returns"].tolist()


def test_the_reward_of_each_turn_stands_on_the_last_token_that_earned_it() -> None:
    two_turns = sample(0, 0, [[(2, 4), (6, 8)]], 1.5, [0.5, 1.0])
    alone = sample(1, 0, [[(1, 3)]], -2.0)
    assert rewards_by_token([two_turns, alone]) == [0, 0, 0, 0.5, 0, 0, 0, 1.0, 0, 0, 0, -2.0, 0]


def test_turns_run_on_through_the_segments_of_a_trajectory() -> None:
    told_apart = sample(0, 0, [[(1, 3)], [(2, 4), (5, 6)]], 6.0, [1.0, 2.0, 3.0])
    assert rewards_by_token([told_apart]) == [0, 0, 1.0, 0, 0, 0, 0, 2.0, 0, 3.0, 0]
    at_the_end = sample(0, 0, [[(1, 3)], [(2, 4), (5, 6)]], 6.0)
    assert rewards_by_token([at_the_end]) == [0] * 9 + [6.0, 0]


def test_a_turn_in_which_nothing_was_sampled_pays_at_the_end() -> None:
    silent = sample(0, 0, [[(1, 3), (5, 5), (6, 7)]], 7.0, [1.0, 2.0, 4.0])
    assert rewards_by_token([silent]) == [0, 0, 1.0, 0, 0, 0, 6.0, 0]
    last_silent = sample(0, 0, [[(1, 3), (5, 5)]], 3.0, [1.0, 2.0])
    assert rewards_by_token([last_silent]) == [0, 0, 3.0, 0, 0, 0]


def test_penalties_stand_on_the_last_token_and_leave_the_turns_alone() -> None:
    shaping = RewardShaping(WIDE, overlong_buffer=4, overlong_factor=2.0, max_new_tokens=6)
    turns = sample(0, 0, [[(1, 3), (4, 6)]], 1.5, [0.5, 1.0])
    # Four tokens of six, two of which lie in the buffer of four: half of the factor.
    assert rewards_by_token([turns], shaping) == [0, 0, 0.5, 0, 0, 0.0, 0]
    whole = sample(0, 0, [[(1, 3), (4, 6)]], 1.5)
    assert rewards_by_token([whole], shaping) == [0, 0, 0, 0, 0, 0.5, 0]


@pytest.mark.parametrize(("coef", "expected"), [(0.5, 0.75), (0.0, 0.0), (-1.0, -1.0)])
def test_a_truncated_trajectory_is_worth_less_in_sum_and_others_are_not(coef: float, expected: float) -> None:
    shaping = RewardShaping(WIDE, stop_properly_coef=coef)
    for steps in (None, [0.5, 1.0]):
        cut = sample(0, 0, [[(1, 3), (4, 6)]], 1.5, steps, truncated=True)
        other = sample(0, 1, [[(1, 3), (4, 6)]], 1.5, steps)
        found = rewards_by_token([cut, other], shaping)
        assert sum(found[:7]) == pytest.approx(expected) and sum(found[7:]) == 1.5
        assert found[2] == (0.0 if steps is None else 0.5)


# --- groups


def worths(values: list[float], sizes: list[int]) -> Any:
    """Groups in which all have one reward; lengths, segments and turns differ."""
    samples = []
    for group, (value, size) in enumerate(zip(values, sizes, strict=True)):
        for index in range(size):
            ranges = [[(1, 2 + index)]] * (1 + index % 2)
            samples.append(sample(group, index, ranges, value))
    return samples


rewards = st.floats(-1e6, 1e6, allow_nan=False, width=32)


@given(st.lists(st.tuples(rewards, st.integers(1, 6)), min_size=1, max_size=5), st.sampled_from(GROUP_ESTIMATORS))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_equal_rewards_in_every_group_give_an_advantage_of_exactly_zero(
    groups: list[tuple[float, int]], estimator: str
) -> None:
    experience = prepared(worths([value for value, _ in groups], [size for _, size in groups]))
    add_advantages(experience, algo_of(estimator), PLAIN, 0.0)
    assert not experience.batch.token_fields["advantages"].any()


@given(st.lists(st.tuples(rewards, st.integers(1, 6)), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_group_of_equal_rewards_beside_others_that_differ_is_exactly_zero_unless_advantages_are_whitened(
    groups: list[tuple[float, int]],
) -> None:
    flat = worths([value for value, _ in groups], [size for _, size in groups])
    others = [sample(99, index, [[(1, 3)]], float(index)) for index in range(3)]
    for estimator in sorted(set(GROUP_ESTIMATORS) - set(WHITENING_ESTIMATORS)):
        experience = prepared([*flat, *others])
        add_advantages(experience, algo_of(estimator), PLAIN, 0.0)
        advantages = experience.batch.token_fields["advantages"]
        bound = int(experience.bounds()[len(flat)])
        assert not advantages[:bound].any() and advantages[bound:].any()


def test_all_segments_of_a_trajectory_have_its_advantage() -> None:
    experience = prepared([sample(0, 0, [[(1, 3)], [(2, 4)]], 1.0), sample(0, 1, [[(1, 2)]], 0.0)])
    add_advantages(experience, algo_of("dr_grpo"), PLAIN, 0.0)
    assert experience.batch.token_fields["advantages"].tolist() == [0, 0.5, 0.5, 0, 0, 0, 0.5, 0.5, 0, 0, -0.5, 0]


def test_the_kl_is_in_the_reward_or_in_the_loss_and_never_in_both() -> None:
    def returns(kl: KLConfig) -> list[float]:
        experience = prepared([sample(0, 0, [[(1, 3)]], 1.0)])
        experience.batch.token_fields["ref_logprobs"] = torch.full((4,), -0.5)
        add_advantages(experience, algo_of("reinforce", gamma=0.0, kl=kl), PLAIN, 0.1)
        return experience.batch.token_fields["returns"].tolist()

    assert returns(KLConfig(init_coef=0.1)) == pytest.approx([0, -0.05, 0.95, 0])
    assert returns(KLConfig(init_coef=0.1, use_loss=True, estimator="k3")) == [0, 0, 1.0, 0]


def test_a_sample_without_a_reward_moves_no_baseline_and_is_not_trained_on() -> None:
    samples = [sample(0, index, [[(1, 2)]], reward) for index, reward in enumerate([1.0, 0.0, 0.0, 1.0])]
    samples[1].reward, samples[1].failure = None, "no verdict"
    experience = prepared(trainable(samples, 1))
    add_advantages(experience, algo_of("dr_grpo"), PLAIN, 0.0)
    by_token = experience.batch.token_fields["advantages"][experience.batch.action_mask]
    assert by_token.tolist() == pytest.approx([1 / 3, -2 / 3, 1 / 3])


def test_what_the_engine_sampled_with_is_a_metric_of_its_own_beside_the_change_of_the_policy() -> None:
    segment = Segment([1, 2, 3], [(1, 3)], logprobs=[0.0, -0.9, -0.5])
    experience = prepared([Trajectory(0, 0, "p", None, [segment], 1.0)])
    fields = experience.batch.token_fields
    fields["old_logprobs"] = torch.tensor([0.0, -0.7, -0.6])
    fields["advantages"] = torch.ones(3)
    metrics = StepMetrics()
    metrics.add_correction(add_correction(experience, AdvantageConfig(is_correction_threshold=(0.5, 2.0))))
    _, sums = policy_loss(TokenScores(torch.tensor([0.0, -0.5, -1.0])), experience.batch, LOSS, 2.0, 0.0)
    assert metrics.values["correction/rollout_minus_old"] == pytest.approx(-0.05)
    assert float(sums.means()["ppo_kl"]) == pytest.approx(0.1)


@pytest.mark.parametrize("in_loss", [False, True])
def test_with_a_coefficient_of_0_nothing_asks_for_a_reference_model(in_loss: bool) -> None:
    flags = ["--algo.kl.init_coef", "0", *["--algo.kl.use_loss"] * in_loss, "--algo.advantage.estimator", "rloo"]
    flags += ["--algo.loss_aggregation", "token_mean"]
    config = built("train_ppo_ray", {}, *flags, "--ref.num_gpus_per_node", "3", "--train.colocate_actor_ref")
    assert "ref" not in role_sizes(config) and colocated_roles(config) == [("actor",), ("engine",)]
    experience = prepared([sample(0, index, [[(1, 3)]], float(index)) for index in range(2)])
    add_advantages(experience, config.algo, PLAIN, config.algo.kl.init_coef)
    metrics = StepMetrics()
    metrics.add_experience(experience, config.algo.kl.estimator, PLAIN)
    spec = rl_specs.policy_loss_spec(config)
    loss, sums = policy_loss(TokenScores(torch.zeros(8)), experience.batch, spec, 4.0, config.algo.kl.init_coef)
    # The advantages of the two samples cancel, and there is no other term.
    assert loss == 0 and "kl_loss" not in sums.sums and "kl/reference" not in metrics.values


# --- the coefficient of the KL


def controller_of(kl: KLConfig) -> Any:
    loop = LoopSettings(algo_of("rloo", kl=kl), PLAIN, 1.0, Budget(1, None), 0, 1.0)
    parts = dict.fromkeys(("collector", "turns", "models", "scorer", "updater", "evaluator", "console"))
    return RLController(loop, **parts)  # type: ignore[arg-type]


def test_the_coefficient_follows_the_kl_of_each_step_and_its_samples() -> None:
    controller = controller_of(KLConfig(init_coef=0.1, target=0.5, horizon=1000))
    expected = 0.1
    for kl, samples in ((2.0, 64), (0.5, 64), (0.1, 32)):
        controller._adapt_kl(StepMetrics({"kl/reference": kl}), samples)
        expected = adapt_kl_coef(expected, kl, 0.5, samples, 1000)
        assert controller.position.kl_coef == expected
    assert expected == pytest.approx(0.1 * (1 + 0.2 * 64 / 1000) * (1 - 0.2 * 32 / 1000))


def test_a_coefficient_without_a_target_stays() -> None:
    controller = controller_of(KLConfig(init_coef=0.1))
    controller._adapt_kl(StepMetrics({"kl/reference": 9.0}), 64)
    assert controller.position.kl_coef == 0.1
