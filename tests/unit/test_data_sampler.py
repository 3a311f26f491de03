"""The order of rows, and going on from the middle of it."""

from __future__ import annotations

import json

import pytest

from openrlhf.data.batching import split_updates
from openrlhf.data.sampler import StatefulSampler


def test_an_epoch_gives_every_row_once_and_then_nothing():
    sampler = StatefulSampler(10, seed=1)
    batches = [sampler.next_batch(4) for _ in range(4)]
    assert [len(batch) for batch in batches] == [4, 4, 2, 0]
    assert sorted(sum(batches, [])) == list(range(10))


def test_the_order_follows_from_seed_and_epoch_alone():
    def order(seed: int, epoch: int) -> list[int]:
        sampler = StatefulSampler(50, seed=seed)
        sampler.set_epoch(epoch)
        return sampler.next_batch(50)

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)
    assert StatefulSampler(5, seed=3, shuffle=False).next_batch(5) == [0, 1, 2, 3, 4]


def test_resuming_goes_on_with_the_very_next_row():
    whole = StatefulSampler(100, seed=7)
    whole.set_epoch(3)
    expected = [whole.next_batch(9) for _ in range(12)]
    stopped = StatefulSampler(100, seed=7)
    stopped.set_epoch(3)
    seen = [stopped.next_batch(9) for _ in range(5)]
    resumed = StatefulSampler(100, seed=7)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert seen + [resumed.next_batch(9) for _ in range(7)] == expected


@pytest.mark.parametrize("consumed", [8, 6])
@pytest.mark.parametrize("new_world", [1, 3, 4])
def test_a_run_resumed_on_another_number_of_ranks_repeats_and_loses_nothing(consumed, new_world):
    """The order is global, so what the ranks get together is what was left, whatever their number."""
    before = StatefulSampler(16, seed=0, shuffle=False)
    before.next_batch(consumed)
    after = StatefulSampler(16, seed=0, shuffle=False)
    after.load_state_dict(before.state_dict())
    per_rank = [[] for _ in range(new_world)]
    while batch := after.next_batch(4):
        for position, row in enumerate(batch):
            per_rank[position % new_world].append(row)
    assert sorted(sum(per_rank, [])) == list(range(consumed, 16))
    if (consumed, new_world) == (8, 4):
        assert per_rank == [[8, 12], [9, 13], [10, 14], [11, 15]]


def test_an_epoch_that_is_no_multiple_of_the_batch_skips_no_row_when_resumed():
    """500 rows, 64 a batch: 8 updates make an epoch, so update 9 is the first of epoch 1, at its first row."""
    sampler = StatefulSampler(500, seed=0)
    sizes = split_updates(500, 64)
    seen = [row for size in sizes for row in sampler.next_batch(size)]
    assert len(sizes) == 8 and sorted(seen) == list(range(500))
    resumed = StatefulSampler(500, seed=0)
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.next_batch(64) == []
    resumed.set_epoch(resumed.epoch + 1)
    assert (resumed.epoch, resumed.offset) == (1, 0)
    assert sorted(row for size in sizes for row in resumed.next_batch(size)) == list(range(500))


@pytest.mark.parametrize("change", [{"num_items": 11}, {"seed": 2}, {"shuffle": False}])
def test_a_state_of_other_data_or_another_order_is_refused(change):
    state = StatefulSampler(10, seed=1).state_dict()
    settings = {"num_items": 10, "seed": 1, "shuffle": True} | change
    other = StatefulSampler(settings["num_items"], seed=settings["seed"], shuffle=settings["shuffle"])
    with pytest.raises(ValueError, match=next(iter(change))):
        other.load_state_dict(state)


def test_a_sampler_over_nothing_is_refused():
    with pytest.raises(ValueError, match="no rows"):
        StatefulSampler(0, seed=1)
