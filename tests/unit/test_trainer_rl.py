"""What the RL controller puts together, without any process: rows, shares, denominators, metrics, seeds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from openrlhf.algorithms.metric_sums import MetricSums
from openrlhf.backends.base import StepResult, TokenScores
from openrlhf.config import AdvantageConfig, AlgoConfig, KLConfig
from openrlhf.data.trajectory import Segment, Trajectory
from openrlhf.trainer.controller import trainable
from openrlhf.trainer.experience import Budget, RewardShaping, add_advantages, build_experience, deal, denominator
from openrlhf.trainer.policy_update import PolicyLossSpec, RankResult, policy_loss
from openrlhf.trainer.rl_metrics import StepMetrics
from openrlhf.utils.errors import RunError
from openrlhf.utils.seeds import derive_seed


def trajectory(group: int, sample: int, reward: float | None = 1.0, segments: int = 1, **changes: Any) -> Trajectory:
    """Three prompt tokens and ``sample + 1`` sampled ones in every segment."""
    length = 3 + sample + 1
    parts = [Segment(list(range(10, 10 + length)), [(3, length)]) for _ in range(segments)]
    return Trajectory(group, sample, "p", None, parts, reward=reward, score=reward, **changes)


def test_rows_stand_in_the_order_of_their_trajectories_with_masks_on_what_was_sampled() -> None:
    experience = build_experience([trajectory(0, 0), trajectory(0, 1, segments=2), trajectory(1, 2)])
    assert experience.first_row == [0, 1, 3, 4]
    assert experience.batch.lengths.tolist() == [4, 5, 5, 6]
    assert experience.batch.action_mask.tolist() == [*[0, 0, 0, 1], *[0, 0, 0, 1, 1] * 2, *[0, 0, 0, 1, 1, 1]]
    assert experience.batch.row_fields["trajectory_tokens"].tolist() == [1, 4, 4, 3]
    assert experience.rows_of([1, 2]) == [1, 2, 3]
    assert experience.bounds().tolist() == [0, 4, 14, 20]


@pytest.mark.parametrize(("mode", "units"), [("token_mean", 7.0), ("seq_mean", 2.0), ("constant", 2.0)])
def test_denominators_count_tokens_or_trajectories_and_not_segments(mode: str, units: float) -> None:
    experience = build_experience([trajectory(0, 0), trajectory(0, 1, segments=2), trajectory(1, 2)])
    assert denominator(experience, experience.rows_of([1, 2]), mode) == units


@pytest.mark.parametrize("budget", [Budget(1, None), Budget(2, None), Budget(None, 9), Budget(None, 1000)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_row_is_dealt_once_and_every_rank_gets_as_many_micro_batches(ranks: int, budget: Budget) -> None:
    experience = build_experience([trajectory(0, sample) for sample in range(5)])
    batches, held = deal(experience.batch, [0, 2, 3, 4], ranks, budget, pad_token_id=0)
    assert sorted(row for rank in held for micro in rank for row in micro) == [0, 2, 3, 4]
    assert len({len(rank) for rank in batches}) == 1 and len(batches) == ranks
    for rank, rows_of_rank in zip(batches, held, strict=True):
        for batch, rows in zip(rank, rows_of_rank, strict=True):
            if rows:
                assert batch.lengths.tolist() == experience.batch.lengths[rows].tolist() and batch.pad_rows == 0
            else:
                assert batch.pad_rows == 1 and not batch.action_mask.any()
            assert batch.row_fields.keys() == experience.batch.row_fields.keys()


def _loss_of(experience: Any, budget: Budget, ranks: int, mode: str) -> tuple[float, torch.Tensor]:
    batch = experience.batch
    generator = torch.Generator().manual_seed(3)
    logprobs = torch.randn(batch.tokens.numel(), generator=generator, dtype=torch.float64)
    batch.token_fields["old_logprobs"] = logprobs + 0.3 * torch.randn(logprobs.numel(), generator=generator)
    batch.token_fields["ref_logprobs"] = logprobs + 0.3 * torch.randn(logprobs.numel(), generator=generator)
    batch.token_fields["place"] = torch.arange(logprobs.numel())
    spec = PolicyLossSpec("ppo", 0.2, 0.28, None, mode, 7.0, "k3", 1.0)
    rows = list(range(batch.num_rows))
    units = denominator(experience, rows, mode)
    leaf = logprobs.requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for rank in deal(batch, rows, ranks, budget, 0)[0]:
        for micro in rank:
            scores = TokenScores(leaf[micro.token_fields["place"].long()])
            total = total + policy_loss(scores, micro, spec, units, 0.1)[0]
    total.backward()
    return float(total.detach()), leaf.grad


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean", "constant"])
def test_loss_and_gradient_do_not_depend_on_how_segments_are_dealt_out(mode: str) -> None:
    def fresh() -> Any:
        samples = [trajectory(g, s, reward=g + s / 3, segments=1 + s % 2) for g in range(2) for s in range(4)]
        experience = build_experience(samples)
        experience.batch.token_fields["old_logprobs"] = torch.zeros(experience.batch.tokens.numel())
        algo = AlgoConfig(advantage=AdvantageConfig(estimator="rloo"), kl=KLConfig(init_coef=0.0))
        add_advantages(experience, algo, RewardShaping((-10.0, 10.0)), 0.0)
        return experience

    whole, gradient = _loss_of(fresh(), Budget(64, None), 1, mode)
    for budget, ranks in ((Budget(1, None), 1), (Budget(2, None), 2), (Budget(None, 11), 3)):
        loss, other = _loss_of(fresh(), budget, ranks, mode)
        assert loss == pytest.approx(whole, abs=1e-12)
        assert torch.allclose(other, gradient, atol=1e-12)


def test_metrics_count_failures_and_keep_the_users_numbers_apart() -> None:
    metrics = StepMetrics()
    logs = {"mean": 5.0, "failed": 7.0}
    failed = Trajectory(0, 2, "p", None, [], failure="no")
    metrics.add_trajectories([trajectory(0, 0, 1.0, extra_logs=logs), trajectory(0, 1, 0.0), failed])
    values = metrics.values
    assert values["reward/mean"] == 0.5 and values["reward/failed"] == 1
    assert values["extra/mean"] == 5 and values["extra/failed"] == 7
    assert values["rollout/response_length"] == 1.5 and values["rollout/samples"] == 3


def test_metrics_of_an_update_are_means_over_all_tokens_of_all_ranks() -> None:
    metrics = StepMetrics()
    metrics.add_trajectories([trajectory(0, 0)])
    step = StepResult(grad_norm=2.0, skipped=False, lr=0.1)
    ranks = [RankResult(step, 0.25, {"ppo_kl": 3.0}, 3.0), RankResult(step, 0.5, {"ppo_kl": 1.0}, 1.0)]
    metrics.actor.add(ranks)
    metrics.actor.add([RankResult(StepResult(math.nan, True, 0.1), 0.25, {"ppo_kl": 0.0}, 4.0)])
    metrics.finish(2.0)
    assert metrics.values["policy/ppo_kl"] == pytest.approx(4 / 8)
    assert metrics.values["policy/loss"] == pytest.approx((0.75 + 0.25) / 2)
    assert metrics.values["actor/updates"] == 1 and metrics.values["actor/skipped_steps"] == 1
    assert metrics.values["actor/grad_norm"] == 2.0
    assert MetricSums({"a": 1.0}, 0.0).means()["a"] != MetricSums({"a": 1.0}, 0.0).means()["a"]


def test_a_step_without_one_trainable_sample_stops_with_the_most_frequent_reason() -> None:
    samples = [Trajectory(0, n, "p", None, [], failure="the judge is down") for n in range(3)]
    samples.append(Trajectory(0, 3, "p", None, [], failure="another"))
    with pytest.raises(RunError, match="none of the 4 samples of step 5 .* 3 of them: the judge is down"):
        trainable(samples, 5)
    assert [sample.group_id for sample in trainable([*samples, trajectory(1, 0)], 5)] == [1]


def test_seeds_of_different_places_differ() -> None:
    places = [(seed, group, sample) for seed in (0, 1, 42, 4194304) for group in range(20) for sample in range(20)]
    assert len({derive_seed(*place) for place in places}) == len(places)
    assert all(0 <= derive_seed(*place) < 2**63 for place in places[:50])
    assert derive_seed(1, 2, 3) == derive_seed(1, 2, 3)
