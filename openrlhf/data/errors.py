"""What is wrong with a row, said so that its owner can find and mend it."""

from __future__ import annotations

from collections.abc import Iterable


class DataError(ValueError):
    """A data set or one of its rows cannot be used.

    Args:
        problem: what was found and what was wanted, as one sentence without its full stop.
        source: the file or data set.
        row: number of the row in ``source``, from 1; for JSONL the line number. None where no single row is at fault.
        columns: the columns that the row has.
    """

    def __init__(
        self, problem: str, *, source: str | None = None, row: int | None = None, columns: Iterable[str] | None = None
    ) -> None:
        self.problem = problem
        self.source = source
        self.row = row
        self.columns = None if columns is None else list(columns)
        where = "" if source is None else source if row is None else f"{source}, row {row}"
        text = f"{where}: {problem}" if where else problem
        if self.columns is not None:
            text += f" (columns: {', '.join(self.columns) or 'none'})"
        super().__init__(text)

    def __reduce__(self):
        # Keyword-only arguments are lost by the default way of pickling an exception, which Ray and
        # multiprocessing use.
        return _rebuild, (self.problem, self.source, self.row, self.columns)


class NothingLeft(DataError):
    """Each row is as the settings say, and in none is anything to learn."""


def _rebuild(problem: str, source: str | None, row: int | None, columns: list[str] | None) -> DataError:
    return DataError(problem, source=source, row=row, columns=columns)
