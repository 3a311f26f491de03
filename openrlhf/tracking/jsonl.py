"""Files of one JSON object a line that survive a kill and a resume."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_jsonl(path: Path | str) -> list[dict[str, Any]]:
    """Reads a file of one JSON object a line; empty where there is no file.

    A last line that a killed process left half written, be it inside a character, is passed over.

    Raises:
        ValueError: for a broken line anywhere else, with its number.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: {error}") from error
    return rows


class JSONLFile:
    """Appends JSON objects with a ``step``, one a line, each on disk before ``write`` returns."""

    def __init__(self, path: Path | str, resume_step: int = 0) -> None:
        """Opens the file.

        Args:
            path: the file; its folder is made.
            resume_step: the step that the run goes on from: lines of later steps, which will be done again, are cut.
                0 starts a new file; one of an earlier run becomes ``<name>.previous.jsonl``.
        """
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            if resume_step > 0:
                self._cut_after(resume_step)
            elif self.path.stat().st_size:
                self.path.replace(self.path.with_name(f"{self.path.stem}.previous.jsonl"))
        # Unbuffered: what could not be written must not come up again when the file is closed.
        self._file = self.path.open("ab", buffering=0)

    def _cut_after(self, step: int) -> None:
        kept = [row for row in read_jsonl(self.path) if row["step"] <= step]
        # Written beside and moved over, so that a kill in between loses nothing.
        beside = self.path.with_name(f".{self.path.name}.tmp")
        with beside.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one line; numbers that JSON has no word for (NaN, infinities) become null.

        Raises:
            OSError: the line could not be written; the error names the file.
        """
        line = memoryview(
            (json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) + "\n").encode(errors="backslashreplace")
        )
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """Closes the file; closing twice is harmless."""
        self._file.close()


def _plain(value: Any) -> Any:
    """What JSON can hold: containers walked through, tensors and numpy numbers as numbers, the rest as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return str(value)
