"""Threads with event loops of their own for what users write: code that blocks there blocks neither the engine nor the
deadlines, which are watched from the caller's loop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import re
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from openrlhf.agents.base import AgentError, HeldUpError

logger = logging.getLogger(__name__)

# An overdue call gets this long to end by itself, and a loop this long to show that it still runs.
GRACE_S = 1.0
# Threads cannot be killed: this many that block for good are left behind before no more are started.
MAX_STUCK = 8
_LIBRARY = re.compile(re.escape(sysconfig.get_path("stdlib")) + r"|.*[/\\]site-packages[/\\]|<frozen ")


class _Call:
    """One call on its way: made from the loop ``home``, run as ``task`` of the user's loop."""

    def __init__(self, home: asyncio.AbstractEventLoop, what: str) -> None:
        self.home = home
        self.what = what
        self.started: asyncio.Future[None] = home.create_future()
        self.outcome: asyncio.Future[tuple[Any, BaseException | None]] = home.create_future()
        self.task: asyncio.Task[None] | None = None
        self.unwanted = False

    def tell(self, future: asyncio.Future[Any], value: Any) -> None:
        """Sets a future of the caller from any thread."""
        # The caller's loop may be gone by now, and then nobody waits.
        with contextlib.suppress(RuntimeError):
            self.home.call_soon_threadsafe(lambda: None if future.done() else future.set_result(value))


class UserLoop:
    """One thread with a loop.

    Attributes:
        stuck: why no further call is taken: what blocks the loop for good, and where. None while it works.
        users: samples that are pinned to it.
        longest_block: seconds that user code may keep the loop without awaiting anything.
    """

    def __init__(self, name: str, longest_block: float = math.inf) -> None:
        self.stuck: str | None = None
        self.users = 0
        self.longest_block = longest_block
        self._loop = asyncio.new_event_loop()
        self._calls: set[_Call] = set()
        self._checks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._last_beat = time.monotonic()
        self._seen_at_work: asyncio.Task[Any] | None = None
        self._seen_since = math.inf
        self._loop.call_soon(self._beat)
        # A daemon: one that blocks for good must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def call(self, function: Callable[..., Any], *arguments: Any, what: str, timeout: float | None = None) -> Any:
        """Runs ``function``, plain or async, in the thread.

        Args:
            what: names the call in errors.
            timeout: seconds from the moment when it began to run; None leaves that to the caller's own deadline.

        Raises: what the function raises; AgentError, where it takes too long or blocks the loop for too long;
            HeldUpError, where another one blocks the loop.
        """
        if self.stuck is not None:
            raise HeldUpError(_held_up(self.stuck))
        call = _Call(asyncio.get_running_loop(), what)
        self._calls.add(call)
        self._loop.call_soon_threadsafe(self._begin, call, function, arguments)
        try:
            await self._watch(call.started, math.inf)
            if not await self._watch(call.outcome, math.inf if timeout is None else timeout):
                call.unwanted = True
                raise await self._give_up(call, AgentError(f"{what} took longer than {timeout:g} s"))
            value, error = call.outcome.result()
        except asyncio.CancelledError:
            call.unwanted = True
            self._keep(self._give_up(call, AgentError(f"{what} was cancelled")))
            raise
        finally:
            if not call.unwanted:
                self._calls.discard(call)
        if error is not None:
            raise error
        return value

    async def _watch(self, future: asyncio.Future[Any], timeout: float) -> bool:
        """Waits for a call, and meanwhile for a loop that user code keeps for too long.

        Returns: whether ``future`` is done; False where the time is up.
        """
        end = time.monotonic() + timeout
        while not future.done() and (left := end - time.monotonic()) > 0:
            pause = min(left, self.longest_block / 4)
            await asyncio.wait({future}, timeout=None if math.isinf(pause) else pause)
            if not future.done() and self._kept_for() > self.longest_block and not await self._answers():
                self._retire(self._at_work())
        return future.done()

    def _kept_for(self) -> float:
        """Seconds for which the loop has certainly been kept by one task: the same one at every look, and no beat.

        The loop's silence alone is not it: a turn of the loop may run many tasks, each of which blocks for a moment.
        """
        now, running = time.monotonic(), asyncio.current_task(self._loop)
        if running is not self._seen_at_work:
            self._seen_at_work, self._seen_since = running, now
        return min(now - self._seen_since, self._silence())

    @property
    def alive(self) -> bool:
        """The thread has not ended."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Ends the thread as soon as nothing blocks it."""
        self._closing = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._closing:
            try:
                self._loop.run_forever()
            except BaseException as error:
                # SystemExit in a task that the user's code started leaves the loop; the other samples need it.
                logger.warning("%s: a task raised %s", self._thread.name, type(error).__name__)
        with contextlib.suppress(RuntimeError, SystemExit, KeyboardInterrupt):
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _beat(self) -> None:
        self._last_beat = time.monotonic()
        self._loop.call_later(min(GRACE_S, self.longest_block) / 4, self._beat)

    def _silence(self) -> float:
        """Seconds since the loop last had a turn of its own."""
        return time.monotonic() - self._last_beat

    def _at_work(self) -> _Call | None:
        """The call whose code runs in the thread now; None where it is a task that user code started, or nothing."""
        running = asyncio.current_task(self._loop)
        return next((call for call in self._calls if running is not None and running is call.task), None)

    def _begin(self, call: _Call, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if not call.unwanted:
            call.task = self._loop.create_task(self._execute(call, function, arguments))

    async def _execute(self, call: _Call, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        call.tell(call.started, None)
        value, failure = None, None
        try:
            value = function(*arguments)
            if inspect.isawaitable(value):
                value = await value
        except Exception as error:
            failure = error
        except BaseException as error:
            failure = AgentError(f"{call.what} raised {type(error).__name__}: {error}")
        call.tell(call.outcome, (value, failure))

    def _keep(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    async def _give_up(self, call: _Call, overdue: AgentError) -> AgentError:
        """Ends an unwanted call. Returns: why it is lost: ``overdue``, or what kept it from going on."""
        try:
            return await self._end(call, overdue)
        finally:
            self._calls.discard(call)

    async def _end(self, call: _Call, overdue: AgentError) -> AgentError:
        """Cancels a call; where it goes on and blocks the loop, the loop is given up as well. Returns: as above."""
        # Looked at before it is cancelled: what holds the loop now is what the call's time was lost to.
        holder = self._at_work() if self._silence() > GRACE_S / 2 else None
        self._loop.call_soon_threadsafe(lambda: call.task and call.task.cancel())
        await asyncio.wait({call.outcome}, timeout=GRACE_S)
        if self.stuck is None and not call.outcome.done() and not await self._answers():
            holder = self._at_work()
            # Another call that is at work has a deadline of its own.
            if holder is call or holder is None:
                self._retire(holder)
        if self.stuck is not None:
            _, error = await call.outcome
            return error if isinstance(error, AgentError) else HeldUpError(_held_up(self.stuck))
        if holder is not None and holder is not call:
            place = _place_of(sys._current_frames().get(self._thread.ident or 0))
            return HeldUpError(_held_up(f"{holder.what} of another sample blocks it (at {place})"))
        return overdue

    async def _answers(self) -> bool:
        home = asyncio.get_running_loop()
        pong = home.create_future()
        ping = _Call(home, "ping")
        self._loop.call_soon_threadsafe(ping.tell, pong, None)
        done, _ = await asyncio.wait({pong}, timeout=GRACE_S)
        return bool(done)

    def _retire(self, culprit: _Call | None) -> None:
        """Takes no further call; ``culprit`` fails with the reason, and the others may be tried elsewhere."""
        if self.stuck is not None:
            return
        what = "a task that user code started" if culprit is None else culprit.what
        place = _place_of(sys._current_frames().get(self._thread.ident or 0))
        self.stuck = f"{what} blocks its event loop and does not end (at {place}): await, or use asyncio.to_thread"
        logger.warning("%s; its thread is left behind", self.stuck)
        self.stop()
        for call in self._calls:
            call.tell(call.started, None)
            own = call is culprit
            call.tell(call.outcome, (None, AgentError(self.stuck) if own else HeldUpError(_held_up(self.stuck))))


def _held_up(reason: str) -> str:
    return f"the event loop of this sample was lost: {reason}"


def _place_of(frame: FrameType | None) -> str:
    """Where a thread stands: the innermost line outside the standard library and installed packages."""
    innermost = frame
    while frame is not None and _LIBRARY.match(frame.f_code.co_filename):
        frame = frame.f_back
    found = frame or innermost
    return f"{found.f_code.co_filename}:{found.f_lineno} in {found.f_code.co_name}" if found else "an unknown place"


class UserLoops:
    """A few loops that samples are spread over; a sample stays with one, as its objects may be bound to it."""

    def __init__(self, name: str, count: int = 1) -> None:
        """Args: ``count``: of loops that work at the same time."""
        self._name = name
        self._count = count
        self._loops: list[UserLoop] = []
        self._stuck: list[UserLoop] = []
        weakref.finalize(self, _stop_all, self._loops)

    @contextlib.contextmanager
    def use(self, longest_block: float = math.inf) -> Iterator[UserLoop]:
        """Gives the loop with the fewest samples, started where there are fewer than ``count``.

        Args:
            longest_block: of a loop that is started; see ``UserLoop``.

        Raises: AgentError, where so many have been blocked for good that no more are started.
        """
        loop = self._take(longest_block)
        loop.users += 1
        try:
            yield loop
        finally:
            loop.users -= 1

    def _take(self, longest_block: float) -> UserLoop:
        self._stuck += [loop for loop in self._loops if loop.stuck is not None]
        self._stuck = [loop for loop in self._stuck if loop.alive]
        # In place: the finalizer holds this list.
        self._loops[:] = [loop for loop in self._loops if loop.stuck is None]
        if len(self._stuck) >= MAX_STUCK:
            raise AgentError(
                f"{len(self._stuck)} threads are blocked for good, the last one thus: {self._stuck[-1].stuck}"
            )
        idle = [loop for loop in self._loops if not loop.users]
        if not idle and len(self._loops) < self._count:
            self._loops.append(UserLoop(self._name, longest_block))
        return min(self._loops, key=lambda loop: loop.users)


def _stop_all(loops: list[UserLoop]) -> None:
    for loop in loops:
        loop.stop()
