"""The ordinary agent: one prompt, one response, one reward."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from openrlhf.agents.base import AgentError, AgentExecutorBase, Engine, TemplatedText
from openrlhf.agents.reward import RewardFailure, RewardSource
from openrlhf.data.templates import encode

# Other endings ("abort", "error") leave a response that the policy did not finish and that no budget cut.
_USABLE_ENDINGS = ("stop", "length", "repetition")
_PROMPTS_KEPT = 64


@dataclass(frozen=True)
class PromptFit:
    """How a prompt fits the context.

    Attributes:
        kept: tokens of the prompt that stay; the last ones, as the question stands at the end.
        budget: tokens that may be sampled.
    """

    kept: int
    budget: int


def fit_prompt(prompt_tokens: int, max_length: int, max_tokens: int | None) -> PromptFit:
    """Shares the context between prompt and response so that the asked number of new tokens fits.

    Args:
        max_length: tokens of prompt and response together.
        max_tokens: tokens asked for; None asks for what the prompt leaves, at least 1.

    Raises: AgentError, where no token of the prompt or no new token has room.
    """
    if prompt_tokens < 1:
        raise AgentError("the prompt has no tokens")
    if max_tokens is not None and max_tokens < 1:
        raise AgentError(f"{max_tokens} new tokens were asked for; at least 1 is needed")
    kept = min(prompt_tokens, max_length - (max_tokens or 1))
    if kept < 1:
        raise AgentError(
            f"no room for a prompt: --data.max_len {max_length} holds prompt and response together, and "
            f"--rollout.max_new_tokens asks for {max_tokens or 1} of it"
        )
    return PromptFit(kept, max_length - kept if max_tokens is None else max_tokens)


@dataclass(frozen=True)
class Sampled:
    """What the engine sampled: ids as they were drawn, and their log-probs where it gave them."""

    tokens: list[int]
    logprobs: list[float] | None
    finish_reason: str


async def sample(engine: Engine, prompt_tokens: list[int], sampling_params: Any) -> Sampled:
    """Asks the engine for one response.

    Raises: AgentError, where the response was not finished, or its log-probs do not belong to its tokens.
    """
    output = (await engine.generate(prompt_tokens, sampling_params)).outputs[0]
    tokens = list(map(int, output.token_ids))
    if output.finish_reason not in _USABLE_ENDINGS:
        raise AgentError(f"the engine ended the response with {output.finish_reason!r} after {len(tokens)} tokens")
    if not tokens:
        raise AgentError("the engine returned no token")
    if output.logprobs is None:
        return Sampled(tokens, None, output.finish_reason)
    if len(output.logprobs) != len(tokens):
        raise AgentError(f"the engine returned {len(output.logprobs)} log-probs for {len(tokens)} tokens")
    logprobs = [float(entry[token].logprob) for entry, token in zip(output.logprobs, tokens, strict=True)]
    return Sampled(tokens, logprobs, output.finish_reason)


def _encoded(tokenizer: Any, text: str, templated: bool) -> tuple[int, ...]:
    return tuple(encode(tokenizer, text, templated=templated))


class SingleTurnAgentExecutor(AgentExecutorBase):
    """Samples one response to each prompt and asks ``reward_source`` for its reward."""

    def __init__(self, reward_source: RewardSource | None) -> None:
        """Args: ``reward_source``: None leaves the reward to a reward model, which scores whole batches later."""
        self._reward_source = reward_source
        # The samples of a group have one prompt, and all of a rollout wait for the encoding of theirs.
        self._prompt_ids = lru_cache(maxsize=_PROMPTS_KEPT)(_encoded)

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Engine,
        images: Any = None,
    ) -> dict[str, Any]:
        """Runs one sample; see ``AgentExecutorBase.execute``.

        A prompt that is too long loses tokens on its left. The reward sees the tokens that the policy saw, decoded,
        as query, and the whole prompt's text as prompt.
        """
        if images is not None:
            raise AgentError("prompts with images cannot be sampled yet")
        prompt_tokens = self._prompt_ids(hf_tokenizer, str(prompt), isinstance(prompt, TemplatedText))
        fit = fit_prompt(len(prompt_tokens), max_length, sampling_params.max_tokens)
        cut = len(prompt_tokens) - fit.kept
        prompt_tokens = list(prompt_tokens[cut:])
        if sampling_params.max_tokens != fit.budget:
            sampling_params = copy.deepcopy(sampling_params)
            sampling_params.max_tokens = fit.budget

        sampled = await sample(llm_engine, prompt_tokens, sampling_params)
        tokens = prompt_tokens + sampled.tokens
        logprobs = None if sampled.logprobs is None else [0.0] * len(prompt_tokens) + sampled.logprobs
        return {
            "prompt": prompt,
            "label": label,
            "images": images,
            "observation_tokens": tokens,
            "action_ranges": [(len(prompt_tokens), len(tokens))],
            "rollout_log_probs": logprobs,
            "truncated": sampled.finish_reason == "length",
            "prompt_tokens_cut": cut,
            **await self._reward(hf_tokenizer, tokens, str(prompt), label),
        }

    async def _reward(self, tokenizer: Any, tokens: list[int], prompt: str, label: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"reward": None, "scores": None, "failure": None, "extra_logs": {}}
        if self._reward_source is None:
            return found
        query = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        outcome = await self._reward_source.score(query, prompt, label)
        if isinstance(outcome, RewardFailure):
            return found | {"failure": outcome.reason}
        return found | {"reward": outcome.reward, "scores": outcome.score, "extra_logs": outcome.extra_logs}
