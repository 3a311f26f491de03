"""How rows become updates and micro-batches."""

from __future__ import annotations

import random

import pytest

from openrlhf.data.batching import plan_micro_batches, split_updates


def rows_of(plan: list[list[list[int]]]) -> list[int]:
    return sorted(row for rank in plan for micro in rank for row in micro)


@pytest.mark.parametrize("samples", [4, 5, 8, 9])
@pytest.mark.parametrize("limits", [{"max_tokens": 40}, {"micro_batch_size": 2}, {"max_tokens": 10_000}])
def test_four_ranks_share_any_number_of_rows_without_losing_one(samples, limits):
    lengths = [7 + 5 * (row % 4) for row in range(samples)]
    plan = plan_micro_batches(lengths, 4, **limits)
    assert rows_of(plan) == list(range(samples))
    assert all(sum(map(len, rank)) >= 1 for rank in plan)
    if "micro_batch_size" in limits:
        counts = [sum(map(len, rank)) for rank in plan]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("seed", range(200))
def test_every_plan_keeps_its_promises_on_random_rows(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, rng.choice([10, 300])) for _ in range(rng.randint(0, 60))]
    world_size = rng.choice([1, 2, 3, 8])
    micro_batch_size = rng.choice([None, 1, 3, 8])
    max_tokens = rng.randint(5, 400) if micro_batch_size is None or rng.random() < 0.5 else None
    plan = plan_micro_batches(lengths, world_size, micro_batch_size=micro_batch_size, max_tokens=max_tokens)
    assert rows_of(plan) == list(range(len(lengths)))
    assert len(plan) == world_size
    assert len({len(rank) for rank in plan}) == 1
    micro_batches = [micro for rank in plan for micro in rank]
    if micro_batch_size is not None:
        assert all(len(micro) <= micro_batch_size for micro in micro_batches)
    if max_tokens is not None:
        assert all(len(micro) <= 1 or sum(lengths[row] for row in micro) <= max_tokens for micro in micro_batches)
    if len(lengths) >= world_size:
        assert all(any(rank) for rank in plan)
    assert plan == plan_micro_batches(lengths, world_size, micro_batch_size=micro_batch_size, max_tokens=max_tokens)


def test_tokens_are_balanced_over_ranks_and_not_only_rows():
    lengths = [1000, 10, 10, 10, 1000, 10, 10, 10]
    for limits in ({"micro_batch_size": 4}, {"max_tokens": 1100}):
        plan = plan_micro_batches(lengths, 2, **limits)
        tokens = [sum(lengths[row] for micro in rank for row in micro) for rank in plan]
        assert max(tokens) - min(tokens) <= 10


def test_a_row_longer_than_the_token_budget_stands_alone():
    plan = plan_micro_batches([500, 20, 20], 1, max_tokens=100)
    assert plan == [[[0], [1, 2]]]


def test_a_token_budget_takes_no_more_micro_batches_than_the_rows_fill():
    assert len(plan_micro_batches([50] * 8, 2, max_tokens=100)[0]) == 2


def test_no_rows_make_no_micro_batches():
    assert plan_micro_batches([], 3, max_tokens=10) == [[], [], []]
    assert plan_micro_batches([], 2, micro_batch_size=4) == [[], []]


def test_a_plan_without_a_limit_is_refused():
    with pytest.raises(ValueError, match="micro_batch_size, max_tokens"):
        plan_micro_batches([1, 2], 1)


@pytest.mark.parametrize(
    ("samples", "batch", "sizes"), [(0, 4, []), (3, 4, [3]), (129, 128, [65, 64]), (10, 4, [4, 3, 3]), (8, 4, [4, 4])]
)
def test_updates_are_as_few_as_the_batch_size_allows_and_nearly_equal(samples, batch, sizes):
    assert split_updates(samples, batch) == sizes
