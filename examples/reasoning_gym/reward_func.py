"""reasoning-gym's own score of an answer, for the entry that the label holds; works for every task of it."""

from __future__ import annotations

from typing import Any

from reasoning_gym import get_score_answer_fn

END = "<|im_end|>"


def reward_func(queries: list[str], prompts: list[str], labels: list[dict[str, Any]]) -> dict[str, Any]:
    """Scores answers; `scores` counts the ones that are right and nothing else.

    Args:
        queries: prompts with the answers after them, special tokens kept.
        labels: entries of a reasoning-gym data set.
    """
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        answer = query.removeprefix(prompt).removesuffix(END).strip()
        score = get_score_answer_fn(label["metadata"]["source_dataset"])
        rewards.append(float(score(answer, label)))
    return {"rewards": rewards, "scores": [float(reward == 1.0) for reward in rewards]}
