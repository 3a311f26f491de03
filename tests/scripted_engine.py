"""An engine that answers from a script, for tests of agents; the real one is used in the integration tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass
class Params:
    """The part of vLLM's ``SamplingParams`` that agents read and change."""

    max_tokens: int | None = None
    temperature: float = 1.0
    stop: list[str] = field(default_factory=list)


def completion(
    tokens: list[int], logprobs: list[float] | None = None, finish_reason: str | None = "stop"
) -> SimpleNamespace:
    """A response in the shape of vLLM's ``RequestOutput``."""
    entries = None
    if logprobs is not None:
        entries = [{token: SimpleNamespace(logprob=value)} for token, value in zip(tokens, logprobs, strict=False)]
    output = SimpleNamespace(token_ids=tokens, logprobs=entries, finish_reason=finish_reason)
    return SimpleNamespace(outputs=[output])


class ScriptedEngine:
    """Gives the scripted responses in turn; an exception in their place is raised.

    Attributes:
        requests: (prompt token ids, sampling parameters) of every call.
        dead: what ``check_health`` raises.
    """

    def __init__(self, *responses: Any, weight_version: int = 0) -> None:
        self._responses = list(responses)
        self.weight_version = weight_version
        self.requests: list[tuple[list[int], Any]] = []
        self.dead: Exception | None = None

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """See ``Engine.generate``."""
        self.requests.append((list(prompt_token_ids), sampling_params))
        response = self._responses.pop(0)
        if isinstance(response, Exception):
            raise response
        return response

    async def check_health(self) -> None:
        """See ``Engine.check_health``."""
        if self.dead is not None:
            raise self.dead


class FixedReward:
    """A reward source that gives every sample the same outcome and keeps what it was asked."""

    def __init__(self, outcome: Any) -> None:
        self._outcome = outcome
        self.asked: list[tuple[str, str, Any]] = []

    async def start(self) -> None:
        """Nothing to start."""

    async def score(self, query: str, prompt: str, label: Any) -> Any:
        """See ``RewardSource.score``."""
        self.asked.append((query, prompt, label))
        return self._outcome

    async def close(self) -> None:
        """Nothing to close."""
