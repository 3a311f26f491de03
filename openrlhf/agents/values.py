"""Numbers out of what users' code returns: plain ones, or tensors and arrays with one element."""

from __future__ import annotations

import math
from typing import Any

from openrlhf.agents.base import AgentError
from openrlhf.data.text import broken_character, control_character

LARGEST = 1e15
"""Rewards are trained on in float32, and squared where groups are compared: far beyond this they become infinite."""


def number(key: str, value: Any, *, finite: bool = True) -> float:
    """A float from a number, or from a tensor or array with one element.

    Raises: AgentError, naming ``key``; with ``finite`` also for NaN and infinities.
    """
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        result = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise AgentError(f"'{key}' holds {value!r:.60}, not a number") from error
    if finite and not math.isfinite(result):
        raise AgentError(f"'{key}' holds {result}, not a finite number")
    if finite and abs(result) > LARGEST:
        raise AgentError(f"'{key}' holds {result}, more than training in float32 can hold")
    return result


def optional_number(key: str, value: Any) -> float | None:
    """``number``, or None where ``value`` is None: 0.0 is a number like any other."""
    return None if value is None else number(key, value)


def truth(key: str, value: Any) -> bool:
    """True or False from a bool, or from what ``number`` takes: the text "False" would count as true.

    Raises: AgentError, naming ``key``.
    """
    try:
        return bool(number(key, value))
    except AgentError as error:
        raise AgentError(f"'{key}' is {value!r:.60}, neither True nor False") from error


def whole_text(key: str, value: str) -> str:
    """The text itself. Raises: AgentError, naming ``key``, where it cannot be encoded, and so has no tokens."""
    broken = broken_character(value)
    if broken is not None:
        raise AgentError(f"'{key}' holds {broken}, half of a character, which has no tokens")
    return value


def number_logs(logs: Any) -> dict[str, float]:
    """The ``extra_logs`` of a sample as floats; None is an empty dict.

    Raises: AgentError.
    """
    if logs is None:
        return {}
    if not isinstance(logs, dict):
        raise AgentError(f"'extra_logs' is {type(logs).__name__}, not a dict of numbers")
    for key in logs:
        if control_character(str(key)) is not None:
            raise AgentError(f"'extra_logs' has the key {str(key)!a:.60}, and metrics are named so: use plain text")
    return {str(key): number(f"extra_logs[{key!r}]", value, finite=False) for key, value in logs.items()}
