"""Ray actors with scripted behaviour, for tests of those who wait for them."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import ray

from openrlhf.utils.errors import RunError

# A worker of a test should start at once, so torch and what needs it is imported by the engines alone.
if TYPE_CHECKING:
    from openrlhf.data.trajectory import Trajectory
    from openrlhf.rollout.actor import GroupRequest


@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=32, concurrency_groups={"watch": 8})
class Worker:
    """Stands for one rank; a call of it does not wait for the calls before it."""

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Never returns."""
        threading.Event().wait()

    @ray.method(concurrency_group="watch")
    def resign(self) -> None:
        """A watching call that returns, as none should."""

    def pid(self) -> int:
        """Returns: process id."""
        return os.getpid()

    def after(self, seconds: float, value: Any) -> Any:
        """Returns: ``value``, later."""
        time.sleep(seconds)
        return value

    def fail(self, message: str, error: type[Exception] = ValueError) -> None:
        """Raises."""
        raise error(message)

    def die(self, seconds: float) -> None:
        """Ends this process as the kernel does when memory runs out."""
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    def lose(self, peer: int) -> None:
        """Fails as soon as the process ``peer`` is gone, as a collective does."""
        while os.path.exists(f"/proc/{peer}"):
            time.sleep(0.02)
        raise ConnectionError("connection reset by peer")

    def variables(self, names: list[str]) -> dict[str, str | None]:
        """Returns: environment variables as this process has them."""
        return {name: os.environ.get(name) for name in names}


@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=1000)
class ScriptedActor:
    """Has the methods of ``RolloutActor`` that a pool calls."""

    async def follow(self, seconds: float, faults: dict[int, str]) -> None:
        """Starts anew.

        Args:
            seconds: that a group takes.
            faults: by group id, "die", "raise" or "hold".
        """
        from openrlhf.data import trajectory

        self._trajectory = trajectory
        self._seconds, self._faults = seconds, faults
        self._held = asyncio.Event()
        self._in_flight = 0
        self._most_in_flight = 0
        self._groups: list[int] = []

    async def watch(self) -> None:
        """Never returns."""
        await asyncio.Event().wait()

    async def rollout(self, request: GroupRequest) -> list[Trajectory]:
        """See ``RolloutActor.rollout``."""
        self._groups.append(request.group_id)
        self._in_flight += request.num_samples
        self._most_in_flight = max(self._most_in_flight, self._in_flight)
        await asyncio.sleep(self._seconds)
        fault = self._faults.get(request.group_id)
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "raise":
            raise RunError("the context is full")
        if fault == "hold":
            await self._held.wait()
        self._in_flight -= request.num_samples
        segment = self._trajectory.Segment([request.group_id, 1], [(1, 2)])
        return [
            self._trajectory.Trajectory(
                request.group_id, sample, request.prompt.prompt, request.prompt.label, [segment], reward=1.0
            )
            for sample in range(request.num_samples)
        ]

    async def release(self) -> None:
        """Lets the groups that are held finish."""
        self._held.set()

    async def seen(self) -> tuple[list[int], int]:
        """Returns: groups in the order in which they came, and the most samples that were here at once."""
        return self._groups, self._most_in_flight
