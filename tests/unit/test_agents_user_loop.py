"""Users' code that fails, waits, or blocks: its own samples fail with a reason, and everything else goes on."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from typing import Any

import pytest

from openrlhf.agents import user_loop
from openrlhf.agents.base import AgentError
from openrlhf.agents.user_loop import UserLoops
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
from tests.agent_room import TalkingEngine, play

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("threads_that_end")]


class OneTurn(AgentInstanceBase):
    """Does in its only turn what the label says."""

    step_timeout = 1.0
    release = threading.Event()

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"observation": states["observation"]}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        match states["label"]:
            case "wait":
                await asyncio.sleep(60)
            case "block":
                self.release.wait(60)
            case "busy":
                time.sleep(0.4)
            case BaseException() as error:
                raise error
        return {"rewards": 1.0, "done": True}


def run(*labels: Any, cls: type[AgentInstanceBase] = OneTurn, **options: Any) -> list[Any]:
    executor = MultiTurnAgentExecutor(cls)

    async def all_of_them() -> list[Any]:
        # A sample that is run again asks the engine again.
        return await asyncio.gather(
            *[play(executor, TalkingEngine(*["a"] * 4), label=label, **options) for label in labels]
        )

    return asyncio.run(all_of_them())


def test_a_step_that_waits_too_long_ends_alone() -> None:
    slow, quick = run("wait", "fine")
    assert slow.failure == "OneTurn.step() took longer than 1 s"
    assert quick.reward == 1.0


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError("mine")])
def test_errors_that_would_end_a_loop_fail_their_sample_alone_and_at_once(error: BaseException) -> None:
    bad, good = run(error, "fine")
    assert f"OneTurn.step() raised {type(error).__name__}" in bad.failure
    assert good.reward == 1.0


@pytest.mark.parametrize("error", [StopIteration("x"), ValueError("no such move")])
def test_an_exception_names_its_kind(error: Exception) -> None:
    bad, good = run(error, "fine")
    assert str(error) in bad.failure
    assert good.reward == 1.0


def test_environments_that_block_for_a_while_wait_for_each_other_and_none_is_overdue() -> None:
    class Busy(OneTurn):
        step_timeout = 2.0

    assert [trajectory.reward for trajectory in run(*["busy"] * 6, cls=Busy)] == [1.0] * 6


def test_a_step_that_blocks_for_good_is_named_with_its_place_and_others_get_a_new_thread() -> None:
    async def scenario() -> tuple[Any, Any]:
        executor = MultiTurnAgentExecutor(OneTurn)
        blocked = asyncio.create_task(play(executor, TalkingEngine("a"), label="block"))
        ticks = 0
        while not blocked.done():
            await asyncio.sleep(0.02)
            ticks += 1
        assert ticks > 10, "the engine's own loop must not stand still"
        return blocked.result(), await play(executor, TalkingEngine("a"), label="fine")

    OneTurn.release.clear()
    try:
        blocked, later = asyncio.run(scenario())
    finally:
        OneTurn.release.set()
    assert "OneTurn.step() blocks its event loop and does not end (at " in blocked.failure
    assert re.search(r"test_agents_user_loop.py:\d+ in step", blocked.failure), "the user's line, not the library's"
    assert later.reward == 1.0


def test_a_sample_whose_own_time_runs_out_while_it_blocks_frees_the_others_too() -> None:
    class Patient(OneTurn):
        step_timeout = 600.0
        release = threading.Event()

    async def scenario() -> tuple[Any, Any]:
        executor = MultiTurnAgentExecutor(Patient)
        blocked = asyncio.create_task(play(executor, TalkingEngine("a"), label="block", timeout=0.3))
        await asyncio.sleep(0.05)
        other = await play(executor, TalkingEngine("a", "a"), label="fine", timeout=5.0)
        return await blocked, other

    try:
        blocked, other = asyncio.run(scenario())
    finally:
        Patient.release.set()
    assert blocked.failure == "the sample took longer than 0.3 s"
    assert (other.reward, other.failure) == (1.0, None)


def test_samples_that_a_blocking_one_held_up_are_run_again_and_it_alone_is_dropped() -> None:
    OneTurn.release.clear()
    try:
        blocked, *others = run("block", "fine", "fine", "fine")
    finally:
        OneTurn.release.set()
    assert "OneTurn.step() blocks its event loop and does not end" in blocked.failure
    assert "tries" not in blocked.failure, "what blocks is not tried again where the environment does not ask for it"
    assert [(other.reward, other.failure) for other in others] == [(1.0, None)] * 3


def test_every_blocking_sample_is_dropped_and_the_others_are_run_again_after_each() -> None:
    OneTurn.release.clear()
    try:
        trajectories = run("fine", "block", "fine", "block", "fine")
    finally:
        OneTurn.release.set()
    assert [trajectory.reward for trajectory in trajectories] == [1.0, None, 1.0, None, 1.0]


def test_a_sample_that_waits_while_another_blocks_is_not_blamed_for_being_overdue() -> None:
    class Mixed(OneTurn):
        """One step awaits little and would be in time; the other keeps the loop beyond the first one's deadline."""

        step_timeout = 1.0
        hold = threading.Event()

        async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            if states["label"] == "hold":
                await asyncio.sleep(0.5)
                self.hold.wait(1.2)
            else:
                await asyncio.sleep(0.8)
            return {"rewards": 1.0, "done": True}

    waiting, _ = run("wait", "hold", cls=Mixed)
    assert (waiting.reward, waiting.failure) == (1.0, None)


def test_code_that_blocks_again_and_again_but_briefly_is_left_alone() -> None:
    class Busy(OneTurn):
        step_timeout = 20.0

    executor = MultiTurnAgentExecutor(Busy)
    executor.longest_block = 1.5

    async def scenario() -> list[Any]:
        return await asyncio.gather(*[play(executor, TalkingEngine("a"), label="busy") for _ in range(6)])

    assert [trajectory.reward for trajectory in asyncio.run(scenario())] == [1.0] * 6


def test_threads_that_are_left_behind_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_loop, "MAX_STUCK", 1)
    OneTurn.release.clear()
    executor = MultiTurnAgentExecutor(OneTurn)

    async def twice() -> list[Any]:
        return [await play(executor, TalkingEngine("a"), label=label) for label in ("block", "fine")]

    try:
        _, refused = asyncio.run(twice())
    finally:
        OneTurn.release.set()
    assert refused.failure.startswith("1 threads are blocked for good, the last one thus: OneTurn.step() blocks")


def test_more_threads_let_blocking_environments_work_side_by_side() -> None:
    barrier = threading.Barrier(3)

    class Meeting(OneTurn):
        threads = 3
        step_timeout = 20.0

        async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            barrier.wait(20)
            return {"rewards": 1.0, "done": True}

    assert [trajectory.reward for trajectory in run(1, 2, 3, cls=Meeting)] == [1.0] * 3


def test_samples_of_one_executor_share_asyncio_objects() -> None:
    lock = asyncio.Lock()

    class Sharing(OneTurn):
        async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            async with lock:
                await asyncio.sleep(0.01)
            return {"rewards": 1.0, "done": True}

    assert [trajectory.reward for trajectory in run(1, 2, 3, cls=Sharing)] == [1.0] * 3


def failing(times: int, retries: int) -> type[AgentInstanceBase]:
    made: list[Any] = []

    class Flaky(OneTurn):
        def __init__(self) -> None:
            made.append(self)

        async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            if len(made) <= times:
                raise ConnectionError("the sandbox is away")
            return {"rewards": 1.0, "done": True}

    Flaky.retries = retries
    Flaky.made = made
    return Flaky


def test_a_whole_sample_is_tried_again_only_where_the_environment_asks_for_it() -> None:
    async def one(cls: type[AgentInstanceBase]) -> Any:
        return await play(MultiTurnAgentExecutor(cls), TalkingEngine("a", "a", "a"))

    never = failing(times=1, retries=0)
    trajectory = asyncio.run(one(never))
    assert "the sandbox is away" in trajectory.failure
    assert len(never.made) == 1

    enough = failing(times=2, retries=2)
    trajectory = asyncio.run(one(enough))
    assert (trajectory.reward, trajectory.failure) == (1.0, None)
    assert len(enough.made) == 3, "each try has an object of its own"

    too_few = failing(times=3, retries=2)
    trajectory = asyncio.run(one(too_few))
    assert trajectory.failure.endswith("(in 3 tries)")
    assert trajectory.reward is None


def test_a_task_of_the_user_that_exits_leaves_the_loop_running() -> None:
    async def leave() -> None:
        raise SystemExit(1)

    async def start() -> Any:
        # Kept, as a task that nobody holds may be collected.
        task = asyncio.get_running_loop().create_task(leave())
        await asyncio.sleep(0.05)
        return task.done()

    async def scenario() -> bool:
        loops = UserLoops("test")
        with loops.use() as loop:
            first = await loop.call(start, what="start", timeout=5)
            return first and await loop.call(lambda: True, what="again", timeout=5)

    assert asyncio.run(scenario())


def test_a_call_to_a_retired_loop_is_refused() -> None:
    async def scenario() -> None:
        loops = UserLoops("test")
        with loops.use() as loop:
            loop.stuck = "x() blocks its event loop"
            await loop.call(lambda: None, what="y")

    with pytest.raises(AgentError, match="blocks its event loop"):
        asyncio.run(scenario())
