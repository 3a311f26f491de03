"""Which checkpoints there are, which is the newest, and which have to go. Needs neither torch nor the other ranks."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

# Written last into a checkpoint: a folder without it is what an interrupted run left behind.
COMPLETE = "complete"
LATEST = "latest"
NAME = re.compile(r"global_step(\d+)")


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class CheckpointStore:
    """The checkpoints of one model below one folder, each in ``global_step<N>``.

    Args:
        root: the folder; it need not exist yet.
        max_num: checkpoints that are kept.
        max_mem_gb: room in GB that all of them together may take.
    """

    def __init__(self, root: Path, *, max_num: int, max_mem_gb: float) -> None:
        self.root = Path(root)
        self._max_num = max_num
        self._max_bytes = max_mem_gb * 1e9

    def folder(self, step: int) -> Path:
        """Returns: where the checkpoint after ``step`` optimizer or rollout steps belongs."""
        return self.root / f"global_step{step}"

    def complete(self) -> list[Path]:
        """Returns: the complete checkpoints, oldest first."""
        if not self.root.is_dir():
            return []
        found = []
        for path in self.root.iterdir():
            name = NAME.fullmatch(path.name)
            if name and (path / COMPLETE).is_file():
                found.append((int(name[1]), path))
        return [path for _, path in sorted(found)]

    def latest(self) -> Path | None:
        """Returns: the newest complete checkpoint. Folders decide, not the pointer, which a crash may leave behind."""
        complete = self.complete()
        return complete[-1] if complete else None

    def prune(self) -> None:
        """Points ``latest`` to the newest and removes the oldest beyond the limits; the newest always stays.

        Called after a checkpoint has been written, so that a failure to write never costs an older one.
        """
        kept = self.complete()
        if not kept:
            return
        pointer = self.root / (LATEST + ".partial")
        pointer.write_text(kept[-1].name + "\n")
        os.replace(pointer, self.root / LATEST)
        sizes = [_bytes(path) for path in kept]
        while len(kept) > 1 and (len(kept) > self._max_num or sum(sizes) > self._max_bytes):
            shutil.rmtree(kept.pop(0))
            sizes.pop(0)
