"""The multi-turn agent: policy and environment write one token record in turns."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from openrlhf.agents.base import AgentError, AgentExecutorBase, Engine, TemplatedText
from openrlhf.agents.environment import Turn, read_observation, read_turn
from openrlhf.agents.single_turn import fit_prompt, sample
from openrlhf.agents.user_loop import UserLoop, UserLoops
from openrlhf.data.templates import encode
from openrlhf.utils.seeds import derive_seed


class AgentInstanceBase(ABC):
    """The environment of one sample: each sample gets an object of its own, made without arguments.

    ``__init__``, ``reset`` and ``step`` may be plain or ``async``. They run in a thread beside the engine's, with one
    event loop for all samples: what blocks there holds up other environments, but not the engine. One that blocks for
    good fails alone: the samples that it held up are run again from the start.

    Attributes:
        retries: further tries of a whole sample, each with a new object, after a failed one.
        step_timeout: seconds that one ``__init__``, ``reset`` or ``step`` may take. One that awaits nothing may take
            half of the time of a whole sample at most.
        threads: event loops that the samples are spread over; more than one lets environments that block work side by
            side, and forbids sharing asyncio objects (locks, sessions) between samples.
    """

    retries: int = 0
    step_timeout: float = 600.0
    threads: int = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""
        super().__init__()

    @abstractmethod
    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Begins the sample.

        Args:
            states: ``observation`` (the prompt's text) and ``label``.

        Returns: a dict with ``observation``, the text that the policy goes on from.
        """

    @abstractmethod
    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Answers what the policy wrote.

        Args:
            states: ``observation_text`` (all text before this turn's action), ``action_text`` (what the policy sampled,
                special tokens kept), ``label``, ``sampling_params`` (a copy; change it and return it).

        Returns: a dict with
            ``rewards``: number, or tensor of one element, that this turn earned;
            ``environment_feedback``: text that is appended as it is; may be missing in the last turn;
            ``done``: whether the sample ends here;
            ``scores`` (optional): number from 0 to 1; the last one given counts, and without any the reward does;
            ``sampling_params`` (optional): for the following turns;
            ``extra_logs`` (optional): dict of numbers; a later turn's replaces an earlier one's of the same name.
        """


@dataclass
class _Record:
    """What has been written so far."""

    tokens: list[int]
    text: str
    ranges: list[tuple[int, int]] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    cut: bool = False

    def append_action(self, tokens: list[int], logprobs: list[float] | None, version: int) -> None:
        self.ranges.append((len(self.tokens), len(self.tokens) + len(tokens)))
        self.versions.append(version)
        self.tokens += tokens
        if logprobs is None or self.logprobs is None:
            self.logprobs = None
        else:
            self.logprobs += logprobs

    def append_context(self, tokens: list[int]) -> None:
        self.tokens += tokens
        if self.logprobs is not None:
            self.logprobs += [0.0] * len(tokens)


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Lets the policy act in an environment until that is done or the context is full.

    ``max_length`` bounds all tokens of the sample, feedback included; ``sampling_params.max_tokens`` bounds each turn,
    as it does each request of vLLM. Ids that were sampled are never tokenised again; only the text of the environment
    is, without special tokens of the tokenizer's own.

    Attributes:
        ready: it was told its class of environments.
    """

    ready = False

    def __init__(self, agent_instance_cls: type[AgentInstanceBase]) -> None:
        """Raises: TypeError, where the class is none of ``AgentInstanceBase``, or lacks ``reset`` or ``step``;
        ValueError, where one of its settings cannot be used.
        """
        if not isinstance(agent_instance_cls, type) or not issubclass(agent_instance_cls, AgentInstanceBase):
            raise TypeError(f"MultiTurnAgentExecutor takes a subclass of AgentInstanceBase, not {agent_instance_cls!r}")
        if inspect.isabstract(agent_instance_cls):
            missing = ", ".join(sorted(agent_instance_cls.__abstractmethods__))
            raise TypeError(f"{agent_instance_cls.__name__} has no {missing}()")
        cls = agent_instance_cls
        settings = (("retries", cls.retries, 0), ("threads", cls.threads, 1), ("step_timeout", cls.step_timeout, 0.001))
        for name, value, least in settings:
            if isinstance(value, bool) or not isinstance(value, int | type(least)) or not value >= least:
                raise ValueError(f"{cls.__name__}.{name} is {value!r}; {type(least).__name__} from {least} is expected")
        self._instance_cls = cls
        self.retries = max(self.retries, cls.retries)
        self._loops = UserLoops(cls.__name__, cls.threads)
        self.ready = True

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

        A first observation that is too long loses tokens on its left. What an environment says after the last action
        is kept as far as the context has room for it.

        Raises: AgentError; what the environment raises.
        """
        if images is not None:
            raise AgentError("prompts with images cannot be sampled yet")
        with self._loops.use(self.longest_block) as loop:
            environment = _Environment(self._instance_cls, loop)
            await environment.make()
            text = await environment.reset({"observation": str(prompt), "label": label})
            tokens = encode(hf_tokenizer, text, templated=isinstance(prompt, TemplatedText))
            fit = fit_prompt(len(tokens), max_length, sampling_params.max_tokens)
            record = _Record([], text)
            record.append_context(tokens[len(tokens) - fit.kept :])
            await _play(environment, record, label, sampling_params, max_length, hf_tokenizer, llm_engine)
        rewards = [turn.reward for turn in record.turns]
        scores = [turn.score for turn in record.turns if turn.score is not None]
        return {
            "prompt": prompt,
            "label": label,
            "images": images,
            "observation_tokens": record.tokens,
            "action_ranges": record.ranges,
            "rollout_log_probs": record.logprobs,
            "reward": sum(rewards),
            "step_rewards": rewards,
            "scores": scores[-1] if scores else None,
            "truncated": record.cut,
            "stop_reason": "environment" if record.turns[-1].done else "length",
            "weight_versions": record.versions,
            "extra_logs": {name: value for turn in record.turns for name, value in turn.extra_logs.items()},
            "prompt_tokens_cut": len(tokens) - fit.kept,
        }


class _Environment:
    """One instance of the user's class, in the thread that it lives in."""

    def __init__(self, instance_cls: type[AgentInstanceBase], loop: UserLoop) -> None:
        self._cls = instance_cls
        self._loop = loop

    async def make(self) -> None:
        """Creates the instance; an ``async`` constructor is awaited, which calling the class would not do."""

        async def construct() -> AgentInstanceBase:
            instance = self._cls.__new__(self._cls)
            begun: Any = instance.__init__()
            if inspect.isawaitable(begun):
                await begun
            return instance

        self._instance = await self._call("__init__", construct)

    async def reset(self, states: dict[str, Any]) -> str:
        """Returns: the first observation."""
        returned = await self._call("reset", self._instance.reset, states)
        return read_observation(returned, f"{self._cls.__name__}.reset()")

    async def step(self, states: dict[str, Any]) -> Turn:
        """Returns: what the turn earned, and how it goes on."""
        returned = await self._call("step", self._instance.step, states)
        return read_turn(returned, f"{self._cls.__name__}.step()")

    async def _call(self, name: str, function: Any, *arguments: Any) -> Any:
        what = f"{self._cls.__name__}.{name}()"
        return await self._loop.call(function, *arguments, what=what, timeout=self._cls.step_timeout)


async def _play(
    environment: _Environment,
    record: _Record,
    label: Any,
    sampling_params: Any,
    max_length: int,
    tokenizer: Any,
    engine: Engine,
) -> None:
    """Takes turns until the environment is done or there is no room for another token."""
    current = sampling_params
    while True:
        room = max_length - len(record.tokens)
        turn_params = _for_turn(current, sampling_params, room, len(record.turns))
        version = engine.weight_version
        sampled = await sample(engine, list(record.tokens), turn_params)
        record.append_action(sampled.tokens, sampled.logprobs, version)
        record.cut = sampled.finish_reason == "length"
        action_text = tokenizer.decode(sampled.tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        turn = await environment.step(
            {
                "observation_text": record.text,
                "action_text": action_text,
                "label": label,
                "sampling_params": _to_change(current),
            }
        )
        record.turns.append(turn)
        record.text += action_text + turn.feedback
        room = max_length - len(record.tokens)
        feedback = encode(tokenizer, turn.feedback, templated=True) if turn.feedback else []
        record.append_context(feedback[:room])
        if turn.done:
            return
        if len(feedback) >= room:
            record.cut = True
            return
        if turn.sampling_params is not None:
            current = copy.deepcopy(turn.sampling_params)


def _to_change(current: Any) -> Any:
    """A copy that an environment may give stop strings, which vLLM allows only where it makes text."""
    params = copy.deepcopy(current)
    params.detokenize = True
    return params


def _for_turn(current: Any, first: Any, room: int, turn: int) -> Any:
    """A copy of ``current`` for one request, with what training needs of the sample's ``first`` parameters.

    Args:
        room: tokens that the context has left, at least 1.
        turn: 0 for the first.
    """
    params = copy.deepcopy(current)
    params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    if params.max_tokens < 1:
        raise AgentError(f"sampling_params.max_tokens is {current.max_tokens}; at least 1 is needed")
    if first.logprobs is not None:
        _check_distribution(params, first)
    params.logprobs = first.logprobs
    params.output_kind = first.output_kind
    # Stop strings are found in the text, which the engine otherwise does not make; the ids are the same either way.
    params.detokenize = bool(params.stop)
    if turn and params.seed is not None and params.seed == first.seed:
        # Every request begins its random stream anew: with one seed all turns would draw the same numbers.
        params.seed = derive_seed(first.seed, turn)
    return params


# Settings that change the distribution that tokens are drawn from.
_DISTRIBUTION = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
)


def _check_distribution(params: Any, first: Any) -> None:
    """Raises AgentError where an environment changed what the engine's log-probs are log-probs of."""
    changed = [name for name in _DISTRIBUTION if getattr(params, name, None) != getattr(first, name, None)]
    if changed:
        raise AgentError(
            f"the environment changed sampling_params.{changed[0]}, and the run compares the engine's log-probs with "
            "the trainer's, which are those of the run's own sampling: leave it, or leave out "
            "--algo.advantage.is_correction_enable"
        )
