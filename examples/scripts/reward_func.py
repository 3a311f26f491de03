"""Rewards an answer whose last number is that of the label: a number alone, or a solution that ends with it (GSM8K)."""

from __future__ import annotations

import re
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")

# A wrong number earns a little, so that a policy which never answers has something to learn.
WRONG = 0.1


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    """Gives 1 for the right number, a tenth for another one, 0 for none; ``scores`` counts right ones alone."""
    rewards, scores = [], []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        # A prompt that was too long has lost its beginning, never its end.
        answer = last_number(query.rpartition(prompt[-20:])[2])
        right = answer is not None and answer == last_number(label)
        rewards.append(1.0 if right else WRONG * (answer is not None))
        scores.append(float(right))
    return {"rewards": rewards, "scores": scores}


def last_number(text: str) -> float | None:
    """Returns: the last number in a text; None where there is none."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


reward_func.batched = True
