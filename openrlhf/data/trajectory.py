"""What one sample of a rollout is: the tokens as they were sampled, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Segment:
    """One token record that a policy and its environment wrote together.

    Attributes:
        tokens: the prompt and all that followed, as ids; never re-tokenised.
        action_ranges: half-open ranges of ``tokens`` that the policy sampled, in order, not overlapping.
        logprobs: log-probs of the sampled tokens, as long as ``tokens`` and 0.0 outside the ranges; None where the
            engine was not asked for them.
        weight_versions: the weight version that sampled each range.
        stop_reason: why the last range ended: "stop", "length", "environment" or "error".
    """

    tokens: list[int]
    action_ranges: list[tuple[int, int]]
    logprobs: list[float] | None = None
    weight_versions: list[int] = field(default_factory=list)
    stop_reason: str = "stop"

    def __post_init__(self) -> None:
        end = 0
        for start, stop in self.action_ranges:
            if not end <= start <= stop <= len(self.tokens):
                raise ValueError(
                    f"action range ({start}, {stop}) does not follow ({end}) inside {len(self.tokens)} tokens"
                )
            if start == 0 and stop > 0:
                raise ValueError("the first token of a row has nothing before it, so it cannot be an action")
            end = stop
        if self.logprobs is not None and len(self.logprobs) != len(self.tokens):
            raise ValueError(f"{len(self.logprobs)} log-probs for {len(self.tokens)} tokens")

    @property
    def num_actions(self) -> int:
        """Tokens that the policy produced."""
        return sum(stop - start for start, stop in self.action_ranges)

    def action_mask(self) -> torch.Tensor:
        """Returns: bool [len(tokens)], True where the policy produced the token."""
        mask = torch.zeros(len(self.tokens), dtype=torch.bool)
        for start, stop in self.action_ranges:
            mask[start:stop] = True
        return mask


@dataclass
class Trajectory:
    """One sample of one prompt.

    Attributes:
        group_id: shared by the samples of one prompt in one rollout batch.
        sample_id: position inside the group.
        segments: token records that share the reward; one for single-turn and plain multi-turn.
        reward: None where no reward could be computed; ``failure`` then says why. Never 0 in its place.
        score: for filtering and pass rates, in [0, 1]; the reward where the source gave none.
        step_rewards: what each action range earned, over all segments in order; they sum to ``reward``. None where
            the agent did not tell them apart.
        truncated: cut off by the token budget before the policy stopped by itself.
        prompt_tokens_cut: tokens cut from the left of the prompt so that it fits.
    """

    group_id: int
    sample_id: int
    prompt: str
    label: Any
    segments: list[Segment]
    reward: float | None = None
    failure: str | None = None
    score: float | None = None
    step_rewards: list[float] | None = None
    truncated: bool = False
    prompt_tokens_cut: int = 0
    images: Any = None
    datasource: str = "default"
    extra_logs: dict[str, float] = field(default_factory=dict)

    @property
    def response_length(self) -> int:
        """Tokens that the policy produced, over all segments."""
        return sum(segment.num_actions for segment in self.segments)

    @property
    def total_length(self) -> int:
        """Tokens of all segments."""
        return sum(len(segment.tokens) for segment in self.segments)
