"""Rewards code for the share of its tests that it passes."""

from __future__ import annotations

import re
from typing import Any

from sandbox import require_isolation, run_tests

END = "<|im_end|>"
TIMEOUT_S = 5.0

# Refused when the run starts, and not sample by sample.
require_isolation()


def code_of(answer: str) -> str:
    """Returns: the last fenced block of an answer, or all of it where there is none."""
    blocks = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|$)", answer, flags=re.DOTALL)
    return blocks[-1] if blocks else answer


def reward_func(queries: list[str], prompts: list[str], labels: list[dict[str, Any]]) -> dict[str, Any]:
    """Runs the answers' code.

    Args:
        queries: prompts with the answers after them, special tokens kept.
        labels: ``{"tests": [...]}``, pieces of Python that raise where the code is wrong.
    """
    rewards, overdue = [], []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        answer = query.removeprefix(prompt).removesuffix(END)
        result = run_tests(code_of(answer), label["tests"], timeout=TIMEOUT_S)
        rewards.append(result.passed / len(label["tests"]))
        overdue.append(float(result.timed_out))
    scores = [float(reward == 1.0) for reward in rewards]
    return {"rewards": rewards, "scores": scores, "extra_logs": {"timed_out": overdue}}
