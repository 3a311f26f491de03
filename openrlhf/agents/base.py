"""What an agent is, and the little that it may ask of the engine that samples for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol


class AgentError(RuntimeError):
    """A sample cannot be finished; the message becomes the trajectory's failure."""


class HeldUpError(AgentError):
    """A sample was lost because code of another one blocked the event loop that they share; it is worth another try."""


class TemplatedText(str):
    """A prompt that a chat template wrote, special tokens included, so that tokenising adds none.

    An ordinary string in every other way: executors that render their own prompts need not know of it.
    """


class Engine(Protocol):
    """The engine as agents see it: token ids in, token ids out."""

    weight_version: int

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """Samples one response.

        Returns: an object shaped like vLLM's ``RequestOutput``: ``outputs[0]`` has ``token_ids``, ``finish_reason``
            ("stop", "length", ...) and ``logprobs``, one mapping from token id to an object with ``logprob`` for each
            sampled token, or None where ``sampling_params`` did not ask for them.
        """

    async def check_health(self) -> None:
        """Raises where no further request can be served."""


class AgentExecutorBase(ABC):
    """Produces one sample: drives the engine, and says what the sample is worth.

    One executor serves many samples at once, so ``execute`` keeps what belongs to a sample in local variables.

    Attributes:
        retries: further tries of a whole sample after a failed one; a sample that still fails is dropped and counted.
            A sample that was lost because another one blocked their event loop is tried again in any case.
        longest_block: seconds that one sample's code may keep that loop without awaiting anything; after that it fails,
            and the others go on in a new loop.
    """

    retries: int = 0
    longest_block: float = 600.0

    @abstractmethod
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
        """Runs one sample.

        Args:
            prompt: the prompt's text, as the dataset and the chat template made it.
            label: the row's label, of any type, as the dataset has it.
            sampling_params: vLLM's ``SamplingParams``; this sample's own copy.
            max_length: tokens of prompt and response together.

        Returns: a dict with
            ``prompt``, ``label``, ``images``: as they came;
            ``observation_tokens``: list of int, the prompt and all that followed, as sampled;
            ``action_ranges``: list of half-open (start, end) in ``observation_tokens`` that the policy sampled;
            ``rollout_log_probs``: list of float as long as ``observation_tokens``, or None;
            ``reward``: number, or None where there is none, with the reason in ``failure``;
            ``scores``: number from 0 to 1; missing or None means the reward;
            ``truncated``: bool;
            ``step_rewards`` (optional): what each action range earned, one number a range; they sum to ``reward``;
            ``stop_reason`` (optional): "stop", "length" or "environment"; missing, it follows from ``truncated``;
            ``weight_versions`` (optional): the engine's ``weight_version`` when each range was sampled;
            ``extra_logs``: dict of numbers;
            ``prompt_tokens_cut`` (optional): tokens cut from the left of the prompt;
            ``segments`` (optional): list of dicts with ``observation_tokens``, ``action_ranges``,
            ``rollout_log_probs`` and, optionally, ``stop_reason`` and ``weight_versions``, in place of these keys
            above: token records that share the reward.
        """
