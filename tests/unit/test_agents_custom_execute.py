"""Executors of a user's own: they run beside the engine, reach it, and cannot outlast their sample."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from openrlhf.agents.isolated import IsolatedExecutor
from openrlhf.utils.agent import AgentExecutorBase
from tests.agent_room import TalkingEngine, play
from tests.scripted_engine import completion
from tests.tiny_models import END_ID

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("threads_that_end")]


class Custom(AgentExecutorBase):
    """An executor of a user's own, which talks to the engine by itself."""

    def __init__(self, before: Any = None) -> None:
        self._before = before
        self.thread = 0

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        self.thread = threading.get_ident()
        if self._before is not None:
            self._before()
        ids = hf_tokenizer(prompt)["input_ids"]
        output = await llm_engine.generate(ids, sampling_params, multi_modal_data=None)
        tokens = ids + list(output.outputs[0].token_ids)
        segment = {"observation_tokens": tokens, "action_ranges": [(len(ids), len(tokens))]}
        other = {"observation_tokens": [5, 6, 7], "action_ranges": [(1, 2), (2, 3)], "stop_reason": "stop"}
        return {"segments": [segment, other], "reward": 1.0, "step_rewards": [0.5, 0.25, 0.25]}


def test_a_custom_execute_runs_beside_the_engine_and_reaches_it() -> None:
    custom = Custom()
    engine = TalkingEngine(completion([5, END_ID], [-1.0, -2.0]), weight_version=3)
    trajectory = asyncio.run(play(IsolatedExecutor(custom), engine))
    assert custom.thread != threading.get_ident()
    assert trajectory.failure is None
    assert [segment.num_actions for segment in trajectory.segments] == [2, 2]
    assert trajectory.step_rewards == [0.5, 0.25, 0.25]
    used = engine.requests[0][1]
    assert used.detokenize and not used.skip_special_tokens, "its output's text is there to be read"


def test_a_custom_execute_that_blocks_for_good_cannot_outlast_its_sample() -> None:
    release = threading.Event()
    executor = IsolatedExecutor(Custom(lambda: release.wait(60)))

    async def scenario() -> Any:
        return await play(executor, TalkingEngine("a"), timeout=0.3)

    try:
        trajectory = asyncio.run(scenario())
    finally:
        release.set()
    assert trajectory.failure == "the sample took longer than 0.3 s"


def test_cancelling_a_sample_ends_its_request() -> None:
    ended = []

    class Waiting(TalkingEngine):
        async def generate(self, *arguments: Any, **more: Any) -> Any:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(True)

    trajectory = asyncio.run(play(IsolatedExecutor(Custom()), Waiting(), timeout=0.2))
    assert "took longer than 0.2 s" in trajectory.failure
    assert ended == [True]


def test_code_that_goes_on_after_its_sample_ended_is_refused_by_the_engine() -> None:
    release, engine = threading.Event(), TalkingEngine("a")
    executor = IsolatedExecutor(Custom(lambda: release.wait(60)))

    async def scenario() -> Any:
        trajectory = await play(executor, engine, timeout=0.3)
        release.set()
        for _ in range(10):
            await asyncio.sleep(0.05)
        return trajectory

    try:
        trajectory = asyncio.run(scenario())
    finally:
        release.set()
    assert trajectory.failure == "the sample took longer than 0.3 s"
    assert engine.requests == []


def test_what_the_engine_raises_reaches_the_custom_execute() -> None:
    trajectory = asyncio.run(play(IsolatedExecutor(Custom()), TalkingEngine(ValueError("prompt too long"))))
    assert "prompt too long" in trajectory.failure


def test_an_execute_that_awaits_nothing_for_too_long_is_dropped_before_the_samples_beside_it_run_out_of_time() -> None:
    release = threading.Event()

    class Stubborn(Custom):
        longest_block = 0.4

        async def execute(self, *, label: Any, **others: Any) -> dict[str, Any]:
            if label == "block":
                release.wait(60)
            return await super().execute(label=label, **others)

    executor = IsolatedExecutor(Stubborn())

    async def scenario() -> list[Any]:
        return await asyncio.gather(
            *[play(executor, TalkingEngine("a"), label=label, timeout=8.0) for label in ("block", "fine", "fine")]
        )

    try:
        blocked, *others = asyncio.run(scenario())
    finally:
        release.set()
    assert "Stubborn.execute() blocks its event loop and does not end" in blocked.failure
    assert [(other.reward, other.failure) for other in others] == [(1.0, None)] * 2
