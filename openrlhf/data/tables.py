"""Rows of one file or one Arrow data set, read so that values keep their type and errors can name their place.

JSON is read here and not through Arrow, which forces one type on a column: there, labels of mixed types fail, objects
get the keys of all other rows, and text that looks like a date becomes one.
"""

from __future__ import annotations

import csv
import json
import mmap
import re
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np
import pyarrow as pa

from openrlhf.data.errors import DataError

Row = dict[str, Any]

# A JSON file that is one object may hold its rows under one of these keys.
WRAPPERS = ("data", "rows")

# Their cells are text, and an empty one may be an empty text or a value that is missing.
CELL_SUFFIXES = (".csv", ".tsv")

# Half of a pair of escapes for one character. Only a line that has one can hold text that no encoder takes.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Table(Protocol):
    """Rows that are read one at a time."""

    def __len__(self) -> int:
        """Rows."""

    def row(self, index: int) -> Row:
        """Raises: DataError where the row cannot be read."""

    def locate(self, index: int) -> tuple[str, int]:
        """Returns: file or data set, and the row's number in it from 1 (JSONL: the line)."""


class JsonLinesTable:
    """A file with one JSON object a line; blank lines are skipped. Only where lines start is held in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Arrays, because a list takes five times their memory, and there may be hundreds of millions of lines.
        starts, lines = array("q"), array("q")
        position = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip(b" \t\r\n\xef\xbb\xbf"):
                    starts.append(position)
                    lines.append(number)
                position += len(line)
        self._starts = np.asarray(starts)
        self._lines = np.asarray(lines)
        self._map: mmap.mmap | None = None

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> Row:
        if self._map is None:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        start = int(self._starts[index])
        end = self._map.find(b"\n", start)
        line = self._map[start : end if end >= 0 else len(self._map)]
        try:
            text = line.decode("utf-8-sig")
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"the line is not JSON: {error}", **self._place(index)) from error
        if _SURROGATE.search(text):
            _check_encodable(value, **self._place(index))
        return _as_row(value, **self._place(index))

    def locate(self, index: int) -> tuple[str, int]:
        return str(self.path), int(self._lines[index])

    def _place(self, index: int) -> dict[str, Any]:
        return {"source": str(self.path), "row": int(self._lines[index])}

    def __getstate__(self) -> dict[str, Any]:
        # A map of the file cannot be sent to another process, which opens its own.
        return self.__dict__ | {"_map": None}


class ListTable:
    """Rows that are already in memory: the array of a JSON file, or the lines of a CSV file."""

    def __init__(self, values: Sequence[Any], source: str, *, surrogates: bool = False) -> None:
        """Args: ``surrogates`` are in the file, so that every row is looked at for one without its other half."""
        self.values = values
        self.source = source
        self._surrogates = surrogates

    def __len__(self) -> int:
        return len(self.values)

    def row(self, index: int) -> Row:
        if self._surrogates:
            _check_encodable(self.values[index], source=self.source, row=index + 1)
        return _as_row(self.values[index], source=self.source, row=index + 1)

    def locate(self, index: int) -> tuple[str, int]:
        return self.source, index + 1


class ArrowTable:
    """A data set of the `datasets` library, which maps its file into memory."""

    def __init__(self, data: datasets.Dataset, source: str) -> None:
        self.data = data.with_format(None)
        self.source = source

    def __len__(self) -> int:
        return len(self.data)

    def row(self, index: int) -> Row:
        return self.data[index]

    def locate(self, index: int) -> tuple[str, int]:
        return self.source, index + 1


def read_json_lines(path: Path) -> Table:
    """A `.jsonl` file."""
    return JsonLinesTable(path)


def read_json(path: Path) -> Table:
    """A `.json` file: an array of objects, an object that holds the array as `data` or `rows`, or JSON lines."""
    if _is_json_lines(path):
        return JsonLinesTable(path)
    try:
        text = path.read_text("utf-8-sig")
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the file is not JSON: {error}", source=str(path)) from error
    if isinstance(value, dict):
        rows = [value[key] for key in WRAPPERS if len(value) == 1 and isinstance(value.get(key), list)]
        value = rows[0] if rows else [value]
    if not isinstance(value, list):
        raise DataError(f"the file holds {type(value).__name__}, not an array of objects", source=str(path))
    return ListTable(value, str(path), surrogates=_SURROGATE.search(text) is not None)


def _is_json_lines(path: Path) -> bool:
    """Whether the first line is an object by itself and another line follows."""
    with path.open("rb") as file:
        first = next((line for line in file if line.strip(b" \t\r\n\xef\xbb\xbf")), b"")
        follows = any(line.strip() for line in file)
    try:
        return follows and isinstance(json.loads(first.decode("utf-8-sig")), dict)
    except (ValueError, RecursionError):
        return False


def read_csv(path: Path) -> Table:
    """A `.csv` or `.tsv` file with a header, in memory: every cell is text as it stands, so that a label 07 stays 07.

    Blank lines are skipped; a row with fewer cells than the header has columns lacks the last columns.
    """
    rows: list[Row] = []
    with path.open("rb") as file, _cells_of_any_length():
        # Decoded line by line, so that a byte which is no UTF-8 is found in its own row.
        texts = (line.decode("utf-8-sig" if number == 0 else "utf-8") for number, line in enumerate(file))
        lines = csv.reader(texts, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            header = next(lines, [])
            _check_header(header, path)
            for cells in lines:
                if len(cells) > len(header):
                    raise DataError(
                        f"the row has {len(cells)} cells and the header names {len(header)} columns; a cell with a "
                        "separator in it stands in quotes",
                        source=str(path),
                        row=len(rows) + 1,
                    )
                if any(cell.strip() for cell in cells):
                    rows.append(dict(zip(header, cells, strict=False)))
        except (csv.Error, UnicodeDecodeError) as error:
            problem = f"the row cannot be read ({error})"
            raise DataError(problem, source=str(path), row=len(rows) + 1) from error
    return ListTable(rows, str(path))


@contextmanager
def _cells_of_any_length() -> Iterator[None]:
    """The csv module's limit is one for the whole process, and 128 KB by itself."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _check_header(header: Sequence[str], path: Path) -> None:
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice or not header:
        problem = f"the header names {', '.join(map(repr, twice))} twice" if twice else "the first line is no header"
        raise DataError(problem, source=str(path))


def read_parquet(path: Path) -> Table:
    """A `.parquet` file."""
    return ArrowTable(datasets.Dataset.from_parquet(str(path)), str(path))


def read_arrow(path: Path) -> Table:
    """An `.arrow` file, stream or file format."""
    try:
        return ArrowTable(datasets.Dataset.from_file(str(path)), str(path))
    except pa.ArrowInvalid:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        return ArrowTable(datasets.Dataset(table), str(path))


def read_text(path: Path) -> Table:
    """A `.txt` file: one row a line, in the column `text`."""
    return ArrowTable(datasets.Dataset.from_text(str(path)), str(path))


READERS = {
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".txt": read_text,
}


def read_file(path: Path) -> Table:
    """Reads a data file by its extension, upper or lower case.

    Raises: DataError for an unknown extension or a file that is not what its extension says.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"cannot read a {path.suffix or 'file without extension'}; data files are {', '.join(READERS)}",
            source=str(path),
        )
    if path.stat().st_size == 0:
        raise DataError("the file is empty", source=str(path))
    try:
        return reader(path)
    except (pa.ArrowException, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error
        raise DataError(f"the file cannot be read as {path.suffix.lower()}: {cause}", source=str(path)) from error


def _as_row(value: Any, *, source: str, row: int) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"expected an object, found {type(value).__name__}", source=source, row=row)
    return value


def _check_encodable(value: Any, *, source: str, row: int) -> None:
    """Raises: DataError for text with half of a surrogate pair, which neither a tokenizer nor a file takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        problem = f"{half} is half of a character: write both halves of the pair, or leave it out"
        raise DataError(problem, source=source, row=row) from error
