"""The scoring thread: texts of many requests share forwards, and a failing one fails alone."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Iterator, Sequence

import pytest

from openrlhf.serve.metrics import ServerMetrics
from openrlhf.serve.worker import ScoringError, ScoringWorker, Stopped, plan_forwards
from openrlhf.utils.errors import RunError

POISON, BREAKING, NAN = 666, 999, 404
WAIT_S = 20


class Numbers:
    """Scores a row by its first token, behind a door that a test holds shut; some tokens make trouble."""

    def __init__(self, *, padded: bool = False) -> None:
        self.padded = padded
        self.forwards: list[list[int]] = []
        self.door = threading.Event()
        self.began = threading.Semaphore(0)
        self.broken = False

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        self.forwards.append([len(row) for row in rows])
        self.began.release()
        assert self.door.wait(WAIT_S)
        first = [row[0] for row in rows]
        self.broken |= BREAKING in first
        if self.broken or POISON in first:
            raise IndexError("index out of range")
        return [math.nan if token == NAN else float(token) for token in first]

    def release_memory(self) -> None:
        pass


class Activations:
    """What a forward holds."""


class Hungry(Numbers):
    """Runs out of memory above ``most`` rows; what a forward held must be gone when the memory is wanted again."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._held: weakref.ref[Activations] | None = None
        self.released = 0

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        self._must_be_gone()
        activations = Activations()
        self._held = weakref.ref(activations)
        scores = super().score(rows)
        if len(rows) > self._most:
            raise MemoryError("out of memory")
        return scores

    def release_memory(self) -> None:
        self.released += 1
        self._must_be_gone()

    def _must_be_gone(self) -> None:
        if self._held is not None and self._held() is not None:
            raise AssertionError("a failed forward still holds its memory")


@pytest.fixture
def model() -> Numbers:
    return Numbers()


@pytest.fixture
def worker(model: Numbers) -> Iterator[ScoringWorker[Numbers]]:
    worker = ScoringWorker(lambda: model, ServerMetrics(), max_tokens=100)
    worker.start()
    yield worker
    model.door.set()
    worker.stop(WAIT_S)


def held(worker: ScoringWorker[Numbers], model: Numbers) -> None:
    """Has the worker begin with a first request, so that further ones have to wait."""
    worker.submit([[1]])
    assert model.began.acquire(timeout=WAIT_S)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("max_rows", [None, 2])
def test_every_row_is_in_one_forward_and_no_forward_is_above_its_limits(padded: bool, max_rows: int | None) -> None:
    lengths = [7, 120, 1, 30, 30, 55, 2, 99, 8, 8]
    forwards = plan_forwards(lengths, max_tokens=100, max_rows=max_rows, padded=padded)
    assert sorted(row for forward in forwards for row in forward) == list(range(len(lengths)))
    for forward in forwards:
        of_forward = [lengths[row] for row in forward]
        cost = len(of_forward) * max(of_forward) if padded else sum(of_forward)
        assert len(forward) == 1 or cost <= 100
        assert len(forward) <= (max_rows or 99)
    assert [[lengths[row] for row in forward] for forward in plan_forwards(
        lengths, max_tokens=100, max_rows=None, padded=True
    )] == [[1, 2, 7, 8, 8], [30, 30], [55], [99], [120]]  # fmt: skip


def test_requests_that_wait_share_a_forward_and_each_gets_its_own_scores_in_order(worker, model) -> None:
    held(worker, model)
    waiting = [worker.submit([[20 + n] * (5 - n), [30 + n]]) for n in range(4)]
    model.door.set()
    assert [future.result(WAIT_S) for future in waiting] == [[20.0 + n, 30.0 + n] for n in range(4)]
    # Shortest first, all in one, since they fit.
    assert model.forwards == [[1], [1, 1, 1, 1, 2, 3, 4, 5]]


def test_a_request_larger_than_a_forward_is_scored_in_several(worker, model) -> None:
    model.door.set()
    rows = [[n] * 40 for n in range(30)]
    assert worker.submit(rows).result(WAIT_S) == [float(n) for n in range(30)]
    assert max(map(sum, model.forwards)) <= 100


def test_a_poisoned_request_fails_alone_and_those_that_shared_its_forward_are_answered(worker, model) -> None:
    held(worker, model)
    good, poisoned, other = (worker.submit(rows) for rows in ([[5], [6]], [[7], [POISON]], [[8]]))
    model.door.set()
    assert good.result(WAIT_S) == [5.0, 6.0] and other.result(WAIT_S) == [8.0]
    with pytest.raises(ScoringError, match=r"could not score it \(IndexError: index out of range\)"):
        poisoned.result(WAIT_S)
    assert worker.submit([[9]]).result(WAIT_S) == [9.0] and worker.ready


def test_nothing_of_a_forward_that_ran_out_of_memory_lives_when_its_requests_are_run_alone() -> None:
    model = Hungry(most=1)
    worker = ScoringWorker(lambda: model, ServerMetrics(), max_tokens=100)
    # By counting alone: that the collector may come in between is no answer.
    gc.disable()
    try:
        worker.start()
        held(worker, model)
        apart, together = [worker.submit([[token]]) for token in (5, 6)], worker.submit([[7], [8]])
        model.door.set()
        assert [future.result(WAIT_S) for future in apart] == [[5.0], [6.0]]
        with pytest.raises(ScoringError, match=r"could not score it \(MemoryError: out of memory\)"):
            together.result(WAIT_S)
        assert worker.submit([[9]]).result(WAIT_S) == [9.0] and worker.ready
        assert model.released == 2
    finally:
        gc.enable()
        model.door.set()
        worker.stop(WAIT_S)


def test_a_score_that_is_no_number_fails_its_request_and_names_the_text(worker, model) -> None:
    model.door.set()
    with pytest.raises(ScoringError, match=r"query\[1\]: the model's score is nan"):
        worker.submit([[1], [NAN], [2]]).result(WAIT_S)
    assert worker.submit([[2]]).result(WAIT_S) == [2.0]


def test_a_model_that_can_run_nothing_any_more_ends_the_worker_with_its_first_reason(worker, model) -> None:
    held(worker, model)
    fatal, behind = worker.submit([[BREAKING] * 90]), worker.submit([[1] * 400])
    model.door.set()
    with pytest.raises(ScoringError):
        fatal.result(WAIT_S)
    with pytest.raises(RunError, match="not even on one token; it began with IndexError: index out of range"):
        worker.ended.result(WAIT_S)
    for future in (behind, worker.submit([[1]])):
        with pytest.raises(Stopped):
            future.result(WAIT_S)
    assert not worker.ready


def test_what_nobody_waits_for_any_more_is_not_scored(worker, model) -> None:
    held(worker, model)
    left, kept = worker.submit([[3] * 50]), worker.submit([[4]])
    assert left.cancel()
    model.door.set()
    assert kept.result(WAIT_S) == [4.0]
    assert model.forwards == [[1], [1]]


def test_stopping_answers_what_waits_and_what_comes_later(worker, model) -> None:
    held(worker, model)
    waiting = worker.submit([[5] * 1000])
    worker.stop(0.0)
    for future in (waiting, worker.submit([[6]])):
        with pytest.raises(Stopped):
            future.result(WAIT_S)
    model.door.set()
    worker.ended.result(WAIT_S)


def test_a_model_that_cannot_be_loaded_ends_the_worker_with_the_reason() -> None:
    def load() -> Numbers:
        raise OSError("no such model")

    worker = ScoringWorker(load, ServerMetrics(), max_tokens=100)
    worker.start()
    with pytest.raises(OSError, match="no such model"):
        worker.ended.result(WAIT_S)
    assert not worker.ready
