"""Objectives over rows that are tokenised when their turn comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from openrlhf.data.streaming import StreamedRows
from openrlhf.trainer.supervised import Objective


class StreamedObjective(Objective):
    """Makes an objective over the rows of each step; only what ``window`` gives can be packed."""

    def __init__(self, data: StreamedRows, make: Callable[[Any], Objective]) -> None:
        """Args: ``make``: takes a data set that was tokenised whole."""
        self._data = data
        self._make = make
        self.ahead = data.ahead

    @property
    def num_items(self) -> int:
        """Rows, usable or not."""
        return len(self._data)

    def announce(self, steps: Sequence[Sequence[int]]) -> None:
        """Has the rows of the next steps tokenised ahead."""
        self._data.announce(steps)

    def window(self, items: Sequence[int]) -> tuple[Objective, list[int]]:
        """Tokenises some rows, the same ones on all ranks.

        Returns: an objective over those that can be used, and their numbers in it.

        Raises: DataError where one is not as the settings say.
        """
        part = self._data.window(items)
        return (self, []) if part is None else (self._make(part), list(range(len(part))))


def objective_over(data: Any, make: Callable[[Any], Objective]) -> Objective:
    """Returns: what ``make`` gives for a data set that was tokenised whole, or one that calls it for each step."""
    return StreamedObjective(data, make) if isinstance(data, StreamedRows) else make(data)
