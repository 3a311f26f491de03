"""Rewards a sentence for having as many words as were asked for."""

from __future__ import annotations

import re
from typing import Any

END = "<|im_end|>"


def reward_func(queries: list[str], prompts: list[str], labels: list[int]) -> dict[str, Any]:
    """Gives 1 for the right number of words and less the further it is off.

    Args:
        queries: prompts with the answers after them, special tokens kept.
        labels: the numbers of words that were asked for.
    """
    rewards, scores, words = [], [], []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        answer = query.removeprefix(prompt)
        count = len(re.findall(r"[\w'-]+", answer.removesuffix(END)))
        # A text that was cut off by the token budget did not end where it wanted to.
        finished = answer.endswith(END)
        rewards.append(max(0.0, 1.0 - abs(count - label) / label) if finished else 0.0)
        scores.append(float(finished and count == label))
        words.append(count)
    return {"rewards": rewards, "scores": scores, "extra_logs": {"words": words}}


# Samples that arrive together share a call.
reward_func.batched = True
