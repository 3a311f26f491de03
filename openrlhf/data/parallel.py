"""Rows prepared in several processes, in the order of the rows."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from openrlhf.data.rows import Rows
from openrlhf.data.tables import Row
from openrlhf.utils.errors import RunError

T = TypeVar("T")

# Rows that a process takes at a time, and how many such parts are under way for each process.
PART, AHEAD = 64, 4

_PR_SET_PDEATHSIG = 1

# In a process of a pool: what it was started for. An executor's initializer has only its process's globals to leave
# anything in for later calls, and a function that holds rows and a tokenizer cannot travel with each call.
_function: Callable[[Any], Any] | None = None


class ForkedPool:
    """Processes that call one function.

    They are forked at the first call, so that what the function holds (a tokenizer, rows) is not copied. Therefore the
    first call belongs before the accelerator is used, before Ray starts and before ranks meet.
    """

    def __init__(self, function: Callable[[Any], Any], workers: int) -> None:
        """Args: ``workers``: processes, at least one."""
        context = multiprocessing.get_context("fork")
        self._pool = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(function,))

    def submit(self, argument: Any) -> Future[Any]:
        """Has a process call the function."""
        with _telling_of_killed():
            return self._pool.submit(_call, argument)

    def result(self, future: Future[Any]) -> Any:
        """Returns: what the function returned.

        Raises: RunError where a process was killed; else what the function raises.
        """
        with _telling_of_killed():
            return future.result()

    def close(self) -> None:
        """Ends the processes, once each has finished the call that it is in."""
        self._pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _telling_of_killed() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        raise RunError(
            "a process that prepares rows was killed, perhaps for memory: take fewer --data.dataloader_num_workers"
        ) from error


def _start(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    if sys.platform == "linux":
        # A main process that is killed says nothing to those that it forked, which would wait for ever.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Ctrl-C and SIGTERM are the main process's to answer, which then ends these.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Threads of the tokenizer do not live on in a forked process.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _call(argument: Any) -> Any:
    return _function(argument)


def prepared(rows: Rows, prepare: Callable[[Row], T], workers: int) -> Iterator[T]:
    """Calls ``prepare`` for each row.

    Args:
        workers: processes (``ForkedPool``); 0 calls it in this one.

    Yields: what it returns, in the order of the rows.

    Raises:
        RunError: one of the processes was killed.
        whatever ``prepare`` raises, for the first row for which it does.
    """
    if workers == 0:
        yield from map(prepare, rows)
        return

    def prepare_part(start: int) -> list[T]:
        return [prepare(rows[index]) for index in range(start, min(start + PART, len(rows)))]

    pool = ForkedPool(prepare_part, workers)
    under_way: deque[Future[list[T]]] = deque()
    try:
        for start in range(0, len(rows), PART):
            under_way.append(pool.submit(start))
            if len(under_way) >= AHEAD * workers:
                yield from pool.result(under_way.popleft())
        while under_way:
            yield from pool.result(under_way.popleft())
    finally:
        pool.close()
