"""Agents with a real engine: several turns laid over the ids that vLLM sampled, and log-probs that belong to them."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from openrlhf.agents.loading import load_executor
from openrlhf.agents.runner import run_sample
from openrlhf.data.prompts import PromptRecord
from openrlhf.data.trajectory import Segment, Trajectory
from openrlhf.rollout.vllm_engine import make_sampling_params
from tests.agent_room import REPOSITORY
from tests.integration.engine_room import MAX_LENGTH, Room
from tests.tiny_models import make_tokenizer

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    room = Room(tmp_path_factory.mktemp("agents"), "qwen2")
    yield room
    room.close()


def run(room: Room, path: Path, labels: list[Any], *, max_tokens: int = 12, seed: int | None = 3) -> list[Trajectory]:
    """Runs one sample of an agent file for each label, all at once."""
    executor, tokenizer = load_executor(path), make_tokenizer()

    async def sample(number: int, label: Any) -> Trajectory:
        return await run_sample(
            executor,
            PromptRecord(prompt="think of one two three", label=label, datasource="d", templated=False),
            group_id=0,
            sample_id=number,
            sampling_params=make_sampling_params(
                max_tokens=max_tokens,
                temperature=TEMPERATURE,
                top_p=1.0,
                seed=None if seed is None else seed + number,
                logprobs=True,
            ),
            max_length=MAX_LENGTH,
            tokenizer=tokenizer,
            engine=room.engine,
            timeout=60,
        )

    async def all_of_them() -> list[Trajectory]:
        return await asyncio.gather(*[sample(number, label) for number, label in enumerate(labels)])

    return room.run(all_of_them(), timeout=120)


def gap(room: Room, segment: Segment) -> float:
    """Returns: the largest difference between a segment's log-probs and the model's own."""
    tokens = torch.tensor([segment.tokens])
    with torch.no_grad():
        logits = room.model(tokens).logits[0, :-1]
    logprobs = (logits / TEMPERATURE).log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    mask = segment.action_mask()[1:]
    return float((logprobs - torch.tensor(segment.logprobs)[1:])[mask].abs().max())


def write(folder: Path, code: str) -> Path:
    path = folder / "agent.py"
    path.write_text(textwrap.dedent(code))
    return path


def test_the_log_probs_of_every_turn_are_those_of_the_whole_row(room: Room) -> None:
    trajectories = run(room, REPOSITORY / "examples/multiturn_game/agent.py", [5, 17, 30])
    for trajectory in trajectories:
        assert trajectory.failure is None
        (segment,) = trajectory.segments
        assert len(segment.action_ranges) > 1
        assert len(segment.tokens) <= MAX_LENGTH
        assert segment.num_actions == trajectory.response_length > 0
        assert gap(room, segment) < 1e-4
    first = trajectories[0].segments[0]
    assert all(end - start <= 12 for start, end in first.action_ranges)


def test_seeded_samples_are_repeated_in_every_turn(room: Room) -> None:
    path = REPOSITORY / "examples/multiturn_game/agent.py"
    first, second = (run(room, path, [5, 17]) for _ in range(2))
    assert [t.segments[0].tokens for t in first] == [t.segments[0].tokens for t in second]


def test_a_stop_string_of_an_environment_ends_the_next_turn_where_it_stands(room: Room, tmp_path: Path) -> None:
    code = """
    from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

    class Stopping(AgentInstanceBase):
        turns = 0

        async def reset(self, states):
            return states

        async def step(self, states):
            self.turns += 1
            params = states["sampling_params"]
            params.stop = [states["label"]]
            done = self.turns == 2
            return {"rewards": 0.0, "environment_feedback": " ", "done": done, "sampling_params": params}

    class AgentExecutor(MultiTurnAgentExecutor):
        def __init__(self):
            super().__init__(Stopping)
    """
    (free,) = run(room, write(tmp_path, code), ["no such text"], max_tokens=24)
    tokenizer, ids = make_tokenizer(), free.segments[0]
    start, end = ids.action_ranges[1]
    texts = [tokenizer.decode(ids.tokens[start:stop]) for stop in range(start + 1, end + 1)]
    word = tokenizer.decode([ids.tokens[start + 4]])
    first = next(number for number, text in enumerate(texts) if word in text)
    (stopped,) = run(room, write(tmp_path, code), [word], max_tokens=24)
    begin, finish = stopped.segments[0].action_ranges[1]
    assert stopped.segments[0].tokens[begin:finish] == ids.tokens[start : start + first + 1]
    assert not stopped.truncated


def test_an_execute_of_the_users_own_reads_text_and_log_probs(room: Room, tmp_path: Path) -> None:
    code = """
    from openrlhf.utils.agent import AgentExecutorBase

    class AgentExecutor(AgentExecutorBase):
        async def execute(
            self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None
        ):
            ids = hf_tokenizer(prompt)["input_ids"]
            output = (await llm_engine.generate(ids, sampling_params)).outputs[0]
            sampled = list(output.token_ids)
            decoded = hf_tokenizer.decode(sampled, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            # A random model writes broken characters, which the engine and the tokenizer show in their own ways.
            told, expected = (text.encode("ascii", "ignore") for text in (output.text, decoded))
            assert told == expected and told, (output.text, decoded)
            logprobs = [entry[token].logprob for entry, token in zip(output.logprobs, sampled)]
            return {
                "prompt": prompt,
                "label": label,
                "observation_tokens": ids + sampled,
                "action_ranges": [(len(ids), len(ids) + len(sampled))],
                "rollout_log_probs": [0.0] * len(ids) + logprobs,
                "reward": float(len(sampled)),
                "truncated": output.finish_reason == "length",
            }
    """
    trajectories = run(room, write(tmp_path, code), list(range(4)))
    for trajectory in trajectories:
        assert trajectory.failure is None
        assert trajectory.reward == trajectory.response_length
        assert gap(room, trajectory.segments[0]) < 1e-4
