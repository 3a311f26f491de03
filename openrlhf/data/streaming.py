"""Rows that are tokenised when their turn comes, and not all at the start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from openrlhf.data.errors import NothingLeft
from openrlhf.data.rows import Rows
from openrlhf.data.tables import ListTable

# Rows that are tokenised at the start all the same, so that a wrong column or template is told then.
FIRST_ROWS = 200


class Tokenised(Protocol):
    """A data set that was tokenised whole."""

    truncated: int
    """Rows that were cut."""
    left_out: int
    """Rows that were given and of which nothing can be learned."""

    def __len__(self) -> int:
        """Rows that are in it."""


class StreamedRows:
    """Rows of a data set of which only those of the running step are held as tokens.

    Rows can be read in any order, so the order of training, its number of steps and its resuming are those of a data
    set that is tokenised whole. What is not known beforehand is which rows cannot be used: a bad one stops the run when
    its turn comes, and one of which nothing is left within --data.max_len makes its step smaller.
    """

    def __init__(self, rows: Rows, tokenise: Callable[[Rows], Tokenised], tokenizer: Any) -> None:
        """Tokenises the first rows.

        Args:
            rows: at least one.
            tokenise: makes a data set (``Tokenised``) of some rows.
            tokenizer: that it uses.

        Raises:
            ConfigError: the settings cannot be used.
            DataError: one of the first rows cannot be used.
        """
        tokenise(rows.take(FIRST_ROWS))
        self._rows = rows
        self._tokenise = tokenise
        self._tokenizer = tokenizer
        self._met = self._truncated = self._left_out = 0

    def __len__(self) -> int:
        """Rows, usable or not."""
        return len(self._rows)

    def window(self, items: Sequence[int]) -> Tokenised | None:
        """Tokenises some rows.

        Returns: their data set, in the order of ``items`` and without those that cannot be used; None where none is
            left.

        Raises: DataError where one is not as the settings say.
        """
        self._met += len(items)
        try:
            data = self._tokenise(self._rows.select(items))
        except NothingLeft:
            self._left_out += len(items)
            return None
        self._truncated += data.truncated
        self._left_out += data.left_out
        return data

    @property
    def largest_token(self) -> int:
        """The largest id that the tokenizer can write; which ones the rows hold is not known beforehand."""
        return max(self._tokenizer.get_vocab().values())

    @property
    def in_memory(self) -> list[str]:
        """Files whose format has to be read whole."""
        return [table.source for table in self._rows.tables if isinstance(table, ListTable)]

    def summary(self) -> str:
        """Returns: one line on what is known before training."""
        return f"{len(self)} rows, tokenised when their turn comes (--data.streaming)"

    def closing(self) -> str:
        """Returns: one line on the rows that were met."""
        return f"{self._met} rows were met, {self._truncated} of them cut, {self._left_out} left out as unusable"
