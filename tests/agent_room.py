"""What tests of multi-turn agents share: parameters, scripted turns, and one sample from prompt to trajectory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf.agents.base import AgentExecutorBase
from openrlhf.agents.loading import load_executor
from openrlhf.agents.runner import run_sample
from openrlhf.data.prompts import PromptRecord
from openrlhf.data.trajectory import Trajectory
from tests.scripted_engine import Params, ScriptedEngine, completion
from tests.tiny_models import END_ID, make_tokenizer

REPOSITORY = Path(__file__).parents[1]


@dataclass
class TurnParams(Params):
    """All of vLLM's ``SamplingParams`` that a multi-turn sample reads or changes."""

    logprobs: int | None = 0
    output_kind: str = "final"
    seed: int | None = None
    detokenize: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False


class TalkingEngine(ScriptedEngine):
    """Says the given texts in turn, each with EOS and a log-prob of -0.5 a token; responses may stand among them."""

    def __init__(self, *turns: Any, weight_version: int = 0) -> None:
        super().__init__(*[say(turn) if isinstance(turn, str) else turn for turn in turns])
        self.weight_version = weight_version


def say(text: str, finish_reason: str = "stop") -> Any:
    """Returns: the response that samples ``text``, and EOS where it was finished."""
    tokens = list(make_tokenizer()(text)["input_ids"])
    if finish_reason == "stop":
        tokens.append(END_ID)
    return completion(tokens, [-0.5] * len(tokens), finish_reason)


async def play(
    executor: AgentExecutorBase,
    engine: Any,
    *,
    prompt: str = "1 + 2 =",
    label: Any = 3,
    params: Any = None,
    max_length: int = 512,
    timeout: float = 30.0,
    templated: bool = False,
    tokenizer: Any = None,
) -> Trajectory:
    """Runs one sample."""
    return await run_sample(
        executor,
        PromptRecord(prompt=prompt, label=label, datasource="default", templated=templated),
        group_id=0,
        sample_id=0,
        sampling_params=params or TurnParams(max_tokens=64),
        max_length=max_length,
        tokenizer=tokenizer or make_tokenizer(),
        engine=engine,
        timeout=timeout,
    )


def play_file(path: str | Path, *turns: Any, **options: Any) -> tuple[Trajectory, TalkingEngine]:
    """Runs one sample of an agent file, given relative to the repository, with a policy that says ``turns``."""
    engine = TalkingEngine(*turns)
    return asyncio.run(play(load_executor(REPOSITORY / path), engine, **options)), engine


def text_of(trajectory: Trajectory) -> tuple[str, list[str]]:
    """Returns: the whole text of a trajectory's first segment, and the texts of its actions."""
    tokenizer, segment = make_tokenizer(), trajectory.segments[0]
    actions = [tokenizer.decode(segment.tokens[start:end]) for start, end in segment.action_ranges]
    return tokenizer.decode(segment.tokens), actions
