"""Any number of engines behind one stream of finished groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from openrlhf.data.trajectory import Trajectory
from openrlhf.rollout.actor import GroupRequest
from openrlhf.utils.supervise import Supervisor


class RolloutPool:
    """Shares requests out to the engine that has the fewest unfinished samples."""

    def __init__(
        self, engines: Sequence[Any], supervisor: Supervisor, *, samples_in_flight: int, timeout: float
    ) -> None:
        """
        Args:
            engines: handles of ``RolloutActor``.
            samples_in_flight: samples that an engine is given at once; the rest waits here, so that an engine which
                turns out faster gets more of it.
            timeout: seconds without any finished group after which the run is given up.
        """
        self.engines = list(engines)
        self.names = [f"rollout engine {index}" for index in range(len(engines))]
        self._supervisor = supervisor
        self._limit = samples_in_flight
        self._timeout = timeout

    def stream(self, waiting: deque[GroupRequest]) -> Iterator[list[Trajectory]]:
        """Yields the trajectories of one group at a time, in the order in which groups finish.

        Args:
            waiting: emptied as engines have room; more may be put in while the stream runs.

        Raises:
            RunError: an engine died, failed, or nothing finished in time.
        """
        unfinished = [0] * len(self.engines)
        running: dict[Any, tuple[int, GroupRequest]] = {}
        while waiting or running:
            while waiting:
                engine = min(range(len(self.engines)), key=unfinished.__getitem__)
                if unfinished[engine] and unfinished[engine] + waiting[0].num_samples > self._limit:
                    break
                request = waiting.popleft()
                running[self.engines[engine].rollout.remote(request)] = (engine, request)
                unfinished[engine] += request.num_samples
            ready = self._supervisor.wait_any(
                list(running), what=lambda: self._describe(running), timeout=self._timeout
            )
            for ref in ready:
                engine, request = running.pop(ref)
                unfinished[engine] -= request.num_samples
                yield self._supervisor.result(ref, self.names[engine])

    def call(self, method: str, *args: Any, timeout: float) -> dict[str, Any]:
        """Calls ``method`` on every engine at once and waits. Returns: the results by name.

        Raises: RunError, as ``stream``.
        """
        calls = {
            name: getattr(engine, method).remote(*args) for name, engine in zip(self.names, self.engines, strict=True)
        }
        return self._supervisor.get_all(calls, what=f"the end of {method}", timeout=timeout)

    def _describe(self, running: dict[Any, tuple[int, GroupRequest]]) -> str:
        engines = sorted({self.names[engine] for engine, _ in running.values()})
        groups = [request.group_id for _, request in running.values()]
        return f"{len(groups)} unfinished groups (first: {groups[:5]}) of {', '.join(engines)}"
