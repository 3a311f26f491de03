"""Waiting for Ray workers so that no death and no hang goes unnamed."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from openrlhf.config.errors import ConfigError
from openrlhf.utils.errors import RunError

_GRACE_S = 5.0


class Supervisor:
    """Knows every worker of a run, and watches all of them during each wait.

    A worker is watched through a call that never returns: the call fails as soon as the worker's process is gone, also
    while nobody waits for a result of that worker.
    """

    def __init__(self) -> None:
        self._watched: dict[Any, str] = {}

    def watch(self, name: str, never_returning_call: Any) -> None:
        """Watches the worker ``name``."""
        self._watched[never_returning_call] = name

    def wait_any(self, refs: Sequence[Any], *, what: Callable[[], str], timeout: float) -> list[Any]:
        """Returns: the refs that are ready, at least one.

        Args:
            what: names what is waited for, and from whom; asked when the time is up.
            timeout: seconds.

        Raises:
            RunError: a watched worker died, or the time is up.
        """
        return self._wait(refs, what, time.monotonic() + timeout, timeout)

    def _wait(self, refs: Sequence[Any], what: Callable[[], str], deadline: float, timeout: float) -> list[Any]:
        waited, watched = list(refs), list(self._watched)
        while True:
            ready, _ = ray.wait(
                waited + watched, num_returns=1, timeout=max(0.0, min(30.0, deadline - time.monotonic()))
            )
            self._raise_if_dead([ref for ref in ready if ref in self._watched])
            if any(ref not in self._watched for ref in ready):
                done, _ = ray.wait(waited, num_returns=len(waited), timeout=0)
                return done
            if time.monotonic() >= deadline:
                raise RunError(f"waited {timeout:.0f} s for {what()} in vain")

    def get(self, ref: Any, *, name: str, what: str, timeout: float) -> Any:
        """Returns: the result of one call of the worker ``name``."""
        return self.get_all({name: ref}, what=what, timeout=timeout)[name]

    def get_all(self, refs: dict[str, Any], *, what: str, timeout: float) -> dict[str, Any]:
        """Waits for one call of each named worker.

        Returns:
            By name, the results.

        Raises:
            ConfigError: a call met a setting that cannot be used.
            RunError: a worker died, a call failed otherwise, or the time is up.
        """
        results: dict[str, Any] = {}
        left = {ref: name for name, ref in refs.items()}
        deadline = time.monotonic() + timeout
        while left:
            waited_for = f"{what} from {', '.join(sorted(left.values()))}"
            for ref in self._wait(list(left), functools.partial(str, waited_for), deadline, timeout):
                name = left.pop(ref)
                results[name] = self.result(ref, name)
        return results

    def result(self, ref: Any, name: str) -> Any:
        """Returns: what a finished call gave.

        Raises:
            ConfigError: the call met a setting that cannot be used.
            RunError: the call failed otherwise, or its worker died.
        """
        try:
            return ray.get(ref, timeout=60)
        except GetTimeoutError as error:
            raise RunError(f"{name} finished its work, but its result did not arrive within 60 s") from error
        except RayError as error:
            if isinstance(error, RayTaskError) and isinstance(error.cause, ConfigError):
                # No death of a peer leads to it, and what the user has to change needs no worker.
                raise ConfigError(str(error.cause)) from error
            # A worker that loses a peer fails as well, and may report first: the one that died is the cause.
            self._blame_the_dead()
            raise RunError(f"{name} failed: {describe(error)}") from error

    def _blame_the_dead(self) -> None:
        watched = list(self._watched)
        if watched:
            ready, _ = ray.wait(watched, num_returns=1, timeout=_GRACE_S)
            self._raise_if_dead(ready)

    def _raise_if_dead(self, ready: Sequence[Any]) -> None:
        for ref in ready:
            name = self._watched[ref]
            try:
                ray.get(ref, timeout=60)
            except RayError as error:
                raise RunError(f"{name} died: {describe(error)}") from error
            raise RunError(f"{name} ended by itself")


def describe(error: BaseException) -> str:
    """The cause in one sentence, without the traceback that Ray wraps around it."""
    if isinstance(error, RayTaskError) and error.cause is not None:
        cause = error.cause
        return str(cause) if isinstance(cause, RunError) else f"{type(cause).__name__}: {cause}"
    if isinstance(error, RayActorError):
        pid = re.search(r"pid: (\d+)", str(error))
        detail = re.search(r"Worker exit detail: (.*)", str(error))
        process = f"its process {pid[1]}" if pid else "its process"
        if detail is None:
            return f"{process} has ended: {' '.join(str(error).split())}"
        return f"{process} was killed, crashed or ran out of memory ({detail[1].split('. Some common causes')[0]})"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
