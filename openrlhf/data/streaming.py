"""Rows that are tokenised when their turn comes, and not all at the start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from openrlhf.data.errors import NothingLeft
from openrlhf.data.parallel import ForkedPool
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
    largest_token: int
    """The largest id in it."""

    def __len__(self) -> int:
        """Rows that are in it."""


class StreamedRows:
    """Rows of a data set of which only those of the running step are held as tokens.

    Rows can be read in any order, so the order of training, its number of steps and its resuming are those of a data
    set that is tokenised whole. What is not known beforehand is which rows cannot be used: a bad one stops the run when
    its turn comes, and one of which nothing is left within --data.max_len makes its step smaller.

    Attributes:
        ahead: steps that ``announce`` wants to know of.
        largest_token: the largest id in the first rows that can be used.
    """

    def __init__(self, rows: Rows, tokenise: Callable[[Rows], Tokenised], *, workers: int = 0) -> None:
        """Tokenises the first rows, and more of them where nothing can be learned of those.

        Args:
            rows: at least one.
            tokenise: makes a data set (``Tokenised``) of some rows.
            workers: processes that tokenise announced rows ahead, one step each; 0 tokenises them in this one, in their
                turn.

        Raises:
            ConfigError: the settings cannot be used.
            DataError: one of these rows is not as the settings say, or nothing can be learned of any row.
        """
        self._rows = rows
        self._tokenise = tokenise
        self._met = self._truncated = self._left_out = 0
        self._token_checks: list[Callable[[int], None]] = []
        self.ahead = workers
        self._pool = ForkedPool(self._tokenised, workers) if workers else None
        self._under_way: dict[tuple[int, ...], Future[Tokenised | None]] = {}
        self.largest_token = self._first_usable().largest_token
        self._met = self._truncated = self._left_out = 0

    def _first_usable(self) -> Tokenised:
        for start in range(0, len(self), FIRST_ROWS):
            data = self.window(range(start, min(start + FIRST_ROWS, len(self))))
            if data is not None:
                return data
        try:
            return self._tokenise(self._rows.take(FIRST_ROWS))
        except NothingLeft as error:
            if len(self) <= FIRST_ROWS:
                raise
            more = f"{error.problem}; the same goes for the {len(self) - FIRST_ROWS} behind them"
            raise NothingLeft(more, source=error.source) from error

    def __len__(self) -> int:
        """Rows, usable or not."""
        return len(self._rows)

    def check_tokens(self, check: Callable[[int], None]) -> None:
        """From now on ``check`` is called with the largest token of all rows that are tokenised, and may refuse it."""
        self._token_checks.append(check)

    def announce(self, steps: Sequence[Sequence[int]]) -> None:
        """Says which rows the next steps take, so that they are tokenised ahead where there are processes for it."""
        if self._pool is None:
            return
        for items in map(tuple, steps):
            if items and items not in self._under_way:
                self._under_way[items] = self._pool.submit(items)

    def window(self, items: Sequence[int]) -> Tokenised | None:
        """Tokenises some rows, or takes what was made of them ahead.

        Returns: their data set, in the order of ``items`` and without those that cannot be used; None where none is
            left.

        Raises:
            DataError: one is not as the settings say.
            RunError: a process that tokenised was killed.
            whatever a check of tokens raises.
        """
        items = tuple(items)
        if self._pool is None:
            data = self._tokenised(items)
        else:
            data = self._pool.result(self._under_way.pop(items, None) or self._pool.submit(items))
        self._met += len(items)
        if data is not None:
            for check in self._token_checks:
                check(data.largest_token)
        self._truncated += 0 if data is None else data.truncated
        self._left_out += len(items) if data is None else data.left_out
        return data

    def _tokenised(self, items: tuple[int, ...]) -> Tokenised | None:
        try:
            return self._tokenise(self._rows.select(items))
        except NothingLeft:
            return None

    def close(self) -> None:
        """Ends the processes; nothing can be tokenised afterwards."""
        if self._pool is not None:
            self._pool.close()

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
