"""Many tables as one sequence of rows, each of which knows where it came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from openrlhf.data.errors import DataError
from openrlhf.data.tables import CELL_SUFFIXES, Row, Table

# Columns looked at to say which exist: rows of JSON may each have their own.
PROBED_ROWS = 100


class Rows(Sequence[Row]):
    """A sequence of rows drawn from tables in a given order.

    A row is a dict of its columns and of `__source__` and `__row__`, its file and its number in it.
    """

    def __init__(self, tables: Sequence[Table], order: np.ndarray | None = None) -> None:
        """Args:
        tables: at least one.
        order: int64 [rows], positions in the tables laid end to end; None takes all, in order.
        """
        self.tables = list(tables)
        self._ends = np.asarray(list(accumulate(len(table) for table in tables)), dtype=np.int64)
        self._order = order

    def __len__(self) -> int:
        if self._order is not None:
            return len(self._order)
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Row:
        """Raises: DataError where the row cannot be read, IndexError past the end."""
        table, position = self._find(index)
        source, number = table.locate(position)
        return {**table.row(position), "__source__": source, "__row__": number}

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def locate(self, index: int) -> tuple[str, int]:
        """Returns: the row's file or data set, and its number there from 1."""
        table, position = self._find(index)
        return table.locate(position)

    def take(self, limit: int) -> Rows:
        """Returns: the first ``limit`` rows."""
        order = np.arange(len(self)) if self._order is None else self._order
        return Rows(self.tables, order[:limit])

    def select(self, indices: Sequence[int]) -> Rows:
        """Returns: these rows, in this order."""
        chosen = np.asarray(indices, dtype=np.int64)
        return Rows(self.tables, chosen if self._order is None else self._order[chosen])

    @property
    def column_names(self) -> list[str]:
        """Columns of the first rows, in the order met."""
        names: dict[str, None] = {}
        for index in range(min(PROBED_ROWS, len(self))):
            names.update(dict.fromkeys(columns_of(self[index])))
        return list(names)

    def _find(self, index: int) -> tuple[Table, int]:
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        position = index if self._order is None else int(self._order[index])
        table = int(np.searchsorted(self._ends, position, side="right"))
        return self.tables[table], position - (int(self._ends[table - 1]) if table else 0)


def columns_of(row: Row) -> list[str]:
    """Returns: the names of a row's own columns."""
    return [name for name in row if name not in ("__source__", "__row__")]


def row_error(row: Row, problem: str) -> DataError:
    """Returns: the error that says what is wrong with ``row``, with its place and its columns."""
    return DataError(problem, source=row["__source__"], row=row["__row__"], columns=columns_of(row))


def required_field(row: Row, key: str, flag: str) -> Any:
    """Returns: the value of a column that must be there.

    Args:
        flag: the flag that named the column, for the message.

    Raises: DataError.
    """
    if key not in row:
        raise row_error(row, f"there is no column {key!r}, which {flag} names")
    return row[key]


def nothing_in(row: Row, key: str) -> str | None:
    """Returns: what stands in a column that holds nothing, in words; None where it holds something.

    An empty cell of a CSV file counts: such a file cannot say that the empty text is meant.
    """
    if row[key] is None:
        return "null"
    return "an empty cell" if row[key] == "" and row["__source__"].lower().endswith(CELL_SUFFIXES) else None
