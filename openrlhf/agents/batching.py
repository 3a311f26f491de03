"""Collects samples that arrive together, so that they share one call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from openrlhf.agents.reward_values import Outcome

Sample = tuple[str, str, Any]
"""Query, prompt and label."""

# Samples are collected for this long.
BATCH_WINDOW_S = 0.02


class Batcher:
    """Makes one call for the samples that arrive within ``BATCH_WINDOW_S``.

    Where the call raises, each of its samples gets the error.
    """

    def __init__(
        self,
        call: Callable[[list[Sample]], Awaitable[list[Outcome]]],
        *,
        max_samples: int,
        max_characters: int | None = None,
        closed: Exception,
    ) -> None:
        """
        Args:
            call: gives one outcome a sample.
            max_samples: of one call.
            max_characters: of the queries and prompts of one call; a longer sample goes alone.
            closed: what samples under way get when the batcher is closed.
        """
        self._call = call
        self._max_samples = max_samples
        self._max_characters = max_characters
        self._closed = closed
        self._waiting: list[tuple[Sample, asyncio.Future[Outcome]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def score(self, sample: Sample) -> Outcome:
        """Raises: what the call raises."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((sample, future))
        if len(self._waiting) == 1:
            self._spawn(self._send_soon())
        elif len(self._waiting) >= self._max_samples:
            self._send_all()
        return await future

    def close(self) -> None:
        """Ends calls under way."""
        for task in list(self._tasks):
            task.cancel()

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_soon(self) -> None:
        try:
            await asyncio.sleep(BATCH_WINDOW_S)
        except asyncio.CancelledError:
            waiting, self._waiting = self._waiting, []
            _answer(waiting, [self._closed] * len(waiting))
            return
        self._send_all()

    def _send_all(self) -> None:
        while self._waiting:
            self._spawn(self._send(self._take()))

    def _take(self) -> list[tuple[Sample, asyncio.Future[Outcome]]]:
        count, characters = 0, 0
        for (query, prompt, _), _ in self._waiting[: self._max_samples]:
            characters += len(query) + len(prompt)
            if count and self._max_characters is not None and characters > self._max_characters:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _send(self, batch: list[tuple[Sample, asyncio.Future[Outcome]]]) -> None:
        outcomes: list[Outcome | Exception]
        try:
            outcomes = list(await self._call([sample for sample, _ in batch]))
        except asyncio.CancelledError:
            outcomes = [self._closed] * len(batch)
        except Exception as error:
            outcomes = [error] * len(batch)
        _answer(batch, outcomes)


def _answer(batch: list[tuple[Sample, asyncio.Future[Outcome]]], outcomes: list[Outcome | Exception]) -> None:
    for (_, future), outcome in zip(batch, outcomes, strict=True):
        if future.done():
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
