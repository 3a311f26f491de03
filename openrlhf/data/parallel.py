"""Rows prepared in several processes, in the order of the rows."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from openrlhf.data.rows import Rows
from openrlhf.data.tables import Row
from openrlhf.utils.errors import RunError

T = TypeVar("T")

# Rows that a process takes at a time, and how many such parts are under way for each process.
PART, AHEAD = 64, 4

# In a process of the pool: what it was started for.
_task: tuple[Rows, Callable[[Row], Any]] | None = None


def prepared(rows: Rows, prepare: Callable[[Row], T], workers: int) -> Iterator[T]:
    """Calls ``prepare`` for each row.

    Processes are forked, so that neither tokenizer nor rows are copied; call it before the accelerator is used and
    before Ray starts.

    Args:
        workers: processes; 0 calls it in this one.

    Yields: what it returns, in the order of the rows.

    Raises:
        RunError: one of the processes was killed.
        whatever ``prepare`` raises, for the first row for which it does.
    """
    if workers == 0:
        yield from map(prepare, rows)
        return
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(rows, prepare))
    under_way: deque[Future[list[T]]] = deque()
    try:
        for start in range(0, len(rows), PART):
            under_way.append(pool.submit(_prepare_part, start))
            if len(under_way) >= AHEAD * workers:
                yield from under_way.popleft().result()
        while under_way:
            yield from under_way.popleft().result()
    except BrokenProcessPool as error:
        raise RunError(
            "a process that prepares rows was killed, perhaps for memory: take fewer --data.dataloader_num_workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start(rows: Rows, prepare: Callable[[Row], Any]) -> None:
    global _task
    _task = (rows, prepare)
    # Ctrl-C and SIGTERM are the main process's to answer, which then ends these.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Threads of the tokenizer do not live on in a forked process.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _prepare_part(start: int) -> list[Any]:
    rows, prepare = _task
    return [prepare(rows[index]) for index in range(start, min(start + PART, len(rows)))]
