"""Tables of named functions in which no name is taken twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

Function = TypeVar("Function", bound=Callable)


def register(table: dict[str, Function], kind: str, name: str) -> Callable[[Function], Function]:
    """Returns: a decorator that enters a function into ``table`` under ``name``.

    Args:
        kind: what the table holds, for the messages ("policy loss").

    Raises:
        ValueError: where the name is taken.
    """

    def enter(function: Function) -> Function:
        if name in table:
            raise ValueError(f"the {kind} {name!r} exists already")
        table[name] = function
        return function

    return enter


def look_up(table: Mapping[str, Function], kind: str, name: str) -> Function:
    """Returns: the entry ``name``.

    Raises:
        ValueError: where there is none, with the names that there are.
    """
    if name not in table:
        raise ValueError(f"unknown {kind} {name!r}; there are {', '.join(sorted(table))}")
    return table[name]
