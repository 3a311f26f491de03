"""What a forward over tokens gives back."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class TokenScores:
    """Per-token results of one forward, aligned to the tokens; 0 where ``action_mask`` is 0.

    Attributes:
        logprobs: float32 [T], log-prob of each token under the policy at the asked temperature.
        entropy: float32 [T] of the distribution that the token was drawn from, or None where not asked for.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None = None
