"""What was written beside its place is moved there."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path


def move_files(source: Path, target: Path, *, last: Collection[str]) -> set[str]:
    """Moves all that stands in ``source`` into ``target``, over what has the same name there.

    Args:
        last: names of what is moved last, a config say: a folder that has it is whole. At least one of them is a file
            of ``source``.

    Returns: the names that were moved.

    Raises: OSError.
    """
    paths = sorted(source.iterdir(), key=lambda path: path.name in last)
    # safetensors leaves its files to their owner alone; a config was opened as any file, so it shows the umask.
    mode = stat.S_IMODE(next(path for path in paths if path.name in last).stat().st_mode)
    for path in paths:
        if path.is_file():
            path.chmod(mode)
        os.replace(path, target / path.name)
    return {path.name for path in paths}
