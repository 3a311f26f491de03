"""Where rewards come from: a Python file whose ``reward_func`` runs in processes of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Protocol

from openrlhf.agents.batching import Batcher, Sample
from openrlhf.agents.reward_process import Bystander, CallFailed, RewardProcess
from openrlhf.agents.reward_values import Outcome, RewardFailure, RewardResult
from openrlhf.config.errors import ConfigError

__all__ = ["Outcome", "PythonRewardSource", "RewardFailure", "RewardResult", "RewardSource"]

# Samples that share a call of a batched function, at most.
BATCH_SIZE = 256
# A further process is started only for a call that has waited this long: quick functions need no more than one.
PATIENCE_S = 0.25


class RewardSource(Protocol):
    """Says what samples are worth."""

    async def start(self) -> None:
        """Makes the source ready. Raises: ConfigError, where it can never be."""

    async def score(self, query: str, prompt: str, label: Any) -> Outcome:
        """Rewards one sample; never raises for what a reward function does.

        Args:
            query: prompt and response, decoded with special tokens.
            prompt: the prompt's text alone.
            label: the row's label.
        """

    async def close(self) -> None:
        """Ends everything that the source started."""


class PythonRewardSource:
    """Rewards from ``reward_func(queries, prompts, labels)`` of a Python file.

    The function runs in other processes, so that one that hangs or dies takes nothing else down: an overdue call is
    ended by killing its process, and every failed call is made again up to ``max_retries`` times. A plain function has
    one call at a time in each process, an async one many. It is called with lists of length 1, unless it declares
    ``batched = True``; then samples that arrive together share a call, and are scored one by one if that call fails.
    """

    def __init__(self, path: str | Path, *, workers: int = 4, timeout: float = 300.0, max_retries: int = 2) -> None:
        """
        Args:
            workers: processes at most.
            timeout: seconds that one call may take, and the import of the file.
            max_retries: further tries after a failed one.
        """
        self._path = Path(path).absolute()
        self._limit = workers
        self._timeout = timeout
        self._max_retries = max_retries
        self._processes: list[RewardProcess] = []
        self._starting = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._batched = False
        closed = CallFailed("the reward source was closed")
        self._batcher = Batcher(self._call, max_samples=BATCH_SIZE, closed=closed)
        self._closed = False

    async def start(self) -> None:
        """Starts one process. Raises: ConfigError, where the file cannot be used."""
        if not self._path.is_file():
            raise ConfigError(f"--reward.remote_url: {self._path} is not a file")
        self._batched = (await self._start_process()).batched

    async def score(self, query: str, prompt: str, label: Any) -> Outcome:
        """Rewards one sample; see ``RewardSource.score``."""
        sample = (query, prompt, label)
        reason, tries = "", 0
        while tries <= self._max_retries:
            alone = tries > 0 or not self._batched
            try:
                outcome = await (self._score_alone(sample) if alone else self._batcher.score(sample))
            except Bystander:
                continue
            except (CallFailed, ConfigError) as error:
                reason = str(error)
            else:
                if isinstance(outcome, RewardResult):
                    return outcome
                reason = outcome.reason
            tries += 1
        return RewardFailure(reason if tries == 1 else f"{reason} (in {tries} tries)")

    async def close(self) -> None:
        """Kills the processes; calls under way end as failures."""
        self._closed = True
        for process in self._processes:
            process.stop()
        self._batcher.close()

    async def _score_alone(self, sample: Sample) -> Outcome:
        return (await self._call([sample]))[0]

    async def _call(self, samples: list[Sample]) -> list[Outcome]:
        queries, prompts, labels = (list(column) for column in zip(*samples, strict=True))
        process = await self._take_process()
        try:
            items = await process.call((queries, prompts, labels), self._timeout)
        finally:
            process.load -= 1
            self._wake_one()
        return [RewardFailure(item["failure"]) if "failure" in item else RewardResult(**item) for item in items]

    async def _take_process(self) -> RewardProcess:
        """Returns: the least loaded process that can take a call, with the call counted as its load."""
        waited = False
        while not self._closed:
            self._processes = [process for process in self._processes if process.alive]
            free = [process for process in self._processes if process.load < process.capacity]
            if free:
                process = min(free, key=lambda candidate: candidate.load)
                process.load += 1
                return process
            running = len(self._processes) + self._starting
            if running == 0 or (waited and running < self._limit):
                await self._start_process()
                continue
            waited = not await self._wait_for_one()
        raise CallFailed("the reward source was closed")

    async def _start_process(self) -> RewardProcess:
        self._starting += 1
        try:
            process = await RewardProcess.start(self._path, self._timeout)
        finally:
            self._starting -= 1
        if self._closed:
            process.stop()
        self._processes.append(process)
        self._wake_one()
        return process

    async def _wait_for_one(self) -> bool:
        """Waits until a call has ended. Returns: False where none did for ``PATIENCE_S``."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await future
            return True
        except TimeoutError:
            return False
        finally:
            if future in self._waiting:
                self._waiting.remove(future)

    def _wake_one(self) -> None:
        while self._waiting:
            future = self._waiting.pop(0)
            if not future.done():
                future.set_result(None)
                return
