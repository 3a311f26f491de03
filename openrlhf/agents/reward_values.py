"""Reads what reward functions return, in any of the forms they may use, into one result a sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from openrlhf.agents.values import LARGEST
from openrlhf.data.text import control_character


@dataclass(frozen=True)
class RewardResult:
    """What a reward source says of one sample.

    Attributes:
        score: for filtering and pass rates; the reward where the source gave none.
    """

    reward: float
    score: float
    extra_logs: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardFailure:
    """No reward could be computed. It is never 0 in its place: that would move the baseline of the group."""

    reason: str


Outcome = RewardResult | RewardFailure


class RewardFormError(ValueError):
    """A return value that cannot be matched to the samples; the message says what was expected and found."""


def read_rewards(returned: Any, count: int) -> list[Outcome]:
    """Splits the return value of a reward function over the samples that it was called with.

    Args:
        returned: ``{"rewards", "scores", "extra_logs"}`` (the last two may be missing or None), or the rewards alone.
            Tensors, arrays, lists and, for one sample, plain numbers are taken. In ``extra_logs`` a single number is
            one of the call: each of its samples gets it, so that a mean over samples weighs calls by their size.
        count: number of samples of the call.

    Returns: one outcome a sample; a missing or non-finite reward is that sample's failure alone.

    Raises: RewardFormError.
    """
    scores, logs = None, None
    rewards = returned
    if isinstance(returned, dict):
        if "rewards" not in returned:
            raise RewardFormError(f"no 'rewards' in what was returned, only {sorted(map(str, returned)) or 'nothing'}")
        rewards, scores, logs = returned["rewards"], returned.get("scores"), returned.get("extra_logs")
    reward_list = _per_sample("rewards", rewards, count)
    score_list = [None] * count if scores is None else _per_sample("scores", scores, count)
    log_list = _read_logs(logs, count)
    return [_outcome(*values) for values in zip(reward_list, score_list, log_list, strict=True)]


def _outcome(reward: Any, score: Any, logs: dict[str, float]) -> Outcome:
    if reward is None:
        return RewardFailure("the reward is None")
    # Only an absent score falls back to the reward: 0.0 is a score.
    values = {"reward": _number("'rewards'", reward), "score": _number("'scores'", reward if score is None else score)}
    for name, value in values.items():
        if not abs(value) <= LARGEST:
            return RewardFailure(f"the {name} is {value}")
    return RewardResult(**values, extra_logs=logs)


def _read_logs(logs: Any, count: int) -> list[dict[str, float]]:
    """Gives each sample its entry of every log; a single number counts for all samples of the call."""
    if logs is None:
        return [{} for _ in range(count)]
    if not isinstance(logs, dict):
        raise RewardFormError(f"'extra_logs' is {_kind(logs)}, not a dict of numbers")
    result: list[dict[str, float]] = [{} for _ in range(count)]
    for key, value in logs.items():
        name = f"extra_logs[{key!r}]"
        if control_character(str(key)) is not None:
            raise RewardFormError(
                f"'extra_logs' has the key {str(key)!a:.60}; metrics are named by it: take plain text"
            )
        values = _flat(value)
        if len(values) not in (1, count):
            raise RewardFormError(f"{name}: expected 1 or {count} values, found {len(values)}")
        for entry, item in zip(result, values * count if len(values) == 1 else values, strict=False):
            if item is not None:
                entry[str(key)] = _number(name, item)
    return result


def _per_sample(name: str, value: Any, count: int) -> list[Any]:
    values = _flat(value)
    if len(values) != count:
        raise RewardFormError(f"'{name}': expected {count} values, one for each query, found {len(values)}")
    return values


def _flat(value: Any) -> list[Any]:
    """One list of plain values from a number, a tensor or array of any shape, or nested lists of them."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [item for entry in value for item in _flat(entry)]
    return [value]


def _number(name: str, value: Any) -> float:
    if isinstance(value, str | bytes):
        raise RewardFormError(f"{name} holds {value!r}, not a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardFormError(f"{name} holds {_kind(value)}, not a number") from error


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}"
