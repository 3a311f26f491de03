"""The thread that runs the model, and how texts of many requests share its forwards."""

from __future__ import annotations

import logging
import math
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Generic, Protocol, TypeVar

from openrlhf.serve.metrics import ServerMetrics
from openrlhf.utils.errors import RunError

logger = logging.getLogger(__name__)

# Texts of this many full forwards are taken together, so that sorting finds rows of like length.
FORWARDS_AT_ONCE = 4


class Scorer(Protocol):
    """A model as the worker sees it."""

    @property
    def padded(self) -> bool:
        """Whether a forward pads its rows to the longest."""

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Returns: the score of each row of token ids."""

    def release_memory(self) -> None:
        """Gives back what a failed forward left behind, once nothing refers to it any more."""


Model = TypeVar("Model", bound=Scorer)


class ScoringError(RuntimeError):
    """No scores for a request; the message says why."""


class Stopped(RuntimeError):
    """The worker ended before it came to a request."""


def plan_forwards(lengths: Sequence[int], *, max_tokens: int, max_rows: int | None, padded: bool) -> list[list[int]]:
    """Cuts rows into forwards, shortest rows first.

    Args:
        lengths: tokens of each row.
        max_tokens: of a forward, padding included; a longer row has one to itself.
        max_rows: of a forward; None leaves it to the tokens.
        padded: rows of a forward are padded to the longest.

    Returns: rows of each forward, as positions in ``lengths``; every row once.
    """
    forwards: list[list[int]] = []
    tokens = 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        count = len(forwards[-1]) + 1 if forwards else 1
        tokens = lengths[row] * count if padded else tokens + lengths[row]
        if not forwards or tokens > max_tokens or count > (max_rows or math.inf):
            forwards.append([])
            tokens = lengths[row]
        forwards[-1].append(row)
    return forwards


@dataclass
class _Job:
    """The texts of one request."""

    rows: Sequence[Sequence[int]]
    future: Future[list[float]] = field(default_factory=Future)
    scores: dict[int, float] = field(default_factory=dict)

    def fail(self, error: Exception) -> None:
        # Nobody may wait for it any more.
        with suppress(InvalidStateError):
            self.future.set_exception(error)

    def add(self, row: int, score: float) -> None:
        """Keeps a score; with the last one the request is answered."""
        self.scores[row] = score
        if len(self.scores) < len(self.rows):
            return
        scores = [self.scores[row] for row in range(len(self.rows))]
        bad = next((row for row, score in enumerate(scores) if not math.isfinite(score)), None)
        if bad is not None:
            self.fail(ScoringError(f"query[{bad}]: the model's score is {scores[bad]}, which is no reward"))
            return
        with suppress(InvalidStateError):
            self.future.set_result(scores)


_Text = tuple[_Job, int]
"""A request, and which of its rows."""


class ScoringWorker(Generic[Model]):
    """Loads a model in a thread of its own and scores there what requests hand in.

    Attributes:
        loaded: the model, once it is there.
        ended: done once the thread has ended; an exception where it had to, or where no model could be loaded.
    """

    def __init__(
        self, load: Callable[[], Model], metrics: ServerMetrics, *, max_tokens: int, max_rows: int | None = None
    ) -> None:
        """
        Args:
            load: gives the model; called in the thread.
            max_tokens: tokens of a forward.
            max_rows: texts of a forward; None leaves it to the tokens.
        """
        self._load = load
        self._metrics = metrics
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._waiting: deque[_Text] = deque()
        self._taken: list[_Text] = []
        self._changed = threading.Condition()
        self._stopping = False
        self.loaded: Future[Model] = Future()
        self.ended: Future[None] = Future()
        # A daemon: past the server's deadline a forward that is under way must not hold up the process.
        self._thread = threading.Thread(target=self._run, name="scoring", daemon=True)

    def start(self) -> None:
        """Starts loading."""
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether the model is loaded and scores what is handed in."""
        return self.loaded.done() and not self.ended.done() and not self._stopping

    def submit(self, rows: Sequence[Sequence[int]]) -> Future[list[float]]:
        """Hands in the rows of a request; cancelling the future takes back those whose turn has not come.

        Returns: their scores in order, or a ScoringError, or ``Stopped``.
        """
        job = _Job(rows)
        with self._changed:
            if self._stopping or self.ended.done():
                job.fail(Stopped("the model has stopped"))
            else:
                self._waiting += [(job, row) for row in range(len(rows))]
                self._changed.notify()
        return job.future

    def stop(self, timeout: float) -> None:
        """Ends the thread after its forward; what waits for another gets ``Stopped``.

        Args:
            timeout: seconds to wait for the thread.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)
        # A forward that outlasts the wait must not keep those behind it.
        self._give_up()

    def _give_up(self) -> None:
        """Answers what will not be scored: what waits, and what was taken and is not done."""
        with self._changed:
            texts = [*self._taken, *self._waiting]
            self._waiting.clear()
        for job, _ in texts:
            job.fail(Stopped("the server is stopping"))

    def _run(self) -> None:
        try:
            model = self._load()
            self.loaded.set_result(model)
            while self._take():
                self._score_all(model, self._taken)
        except BaseException as error:
            with self._changed:
                self._stopping = True
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)
        self._give_up()

    def _take(self) -> bool:
        """Waits for texts and takes those that came first. Returns: False where the worker is to stop."""
        with self._changed:
            self._taken = []
            tokens = 0
            while not self._taken:
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if self._stopping:
                    return False
                while self._waiting and tokens < FORWARDS_AT_ONCE * self._max_tokens:
                    job, row = self._waiting.popleft()
                    if not job.future.done():
                        self._taken.append((job, row))
                        tokens += len(job.rows[row])
        return True

    def _score_all(self, model: Model, texts: Sequence[_Text]) -> None:
        lengths = [len(job.rows[row]) for job, row in texts]
        limits = {"max_tokens": self._max_tokens, "max_rows": self._max_rows, "padded": model.padded}
        for forward in plan_forwards(lengths, **limits):
            if not self._stopping:
                self._score(model, [texts[place] for place in forward])

    def _score(self, model: Model, texts: Sequence[_Text]) -> None:
        """One forward. Where it fails, its requests are run one by one, and those that fail alone are to blame.

        Raises: RunError where the model can run nothing any more.
        """
        texts = [(job, row) for job, row in texts if not job.future.done()]
        if not texts:
            return
        outcome = self._forward(model, [job.rows[row] for job, row in texts])
        if not isinstance(outcome, str):
            for (job, row), score in zip(texts, outcome, strict=True):
                job.add(row, score)
            return
        jobs = list({id(job): job for job, _ in texts}.values())
        if len(jobs) == 1:
            jobs[0].fail(ScoringError(f"the model could not score it ({outcome})"))
        self._recover(model, outcome)
        if len(jobs) > 1:
            for job in jobs:
                self._score(model, [text for text in texts if text[0] is job])

    def _forward(self, model: Model, rows: Sequence[Sequence[int]]) -> list[float] | str:
        """Returns: scores, or why there are none.

        Of an error only its text leaves: its traceback keeps the tensors of the failed forward, which after one that
        ran out of memory is the very memory that the next one needs. So it is not handed to the log either.
        """
        tokens = sum(map(len, rows))
        try:
            with self._metrics.forward(len(rows), tokens):
                return model.score(rows)
        except Exception as error:
            logger.error("a forward of %d texts and %d tokens failed\n%s", len(rows), tokens, traceback.format_exc())
            return shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")

    def _recover(self, model: Model, reason: str) -> None:
        """Makes room after a failed forward. After a fault of the GPU all that follow fail too.

        Raises: RunError where not even one token can be scored: then the server has to be started anew.
        """
        try:
            model.release_memory()
            # A token that every vocabulary has.
            model.score([[0]])
        except Exception as error:
            raise RunError(
                f"the model cannot be run any more, not even on one token; it began with {reason}"
            ) from error
