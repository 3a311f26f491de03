"""Temporary folders of processes that may be killed: what is left of one is removed by whoever looks next.

Nothing beyond the standard library is imported, since the process that cleans up after a killed run starts from here.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")

WEIGHTS_PREFIX, ENGINE_PREFIX = "openrlhf-weights-", "openrlhf-engine-"
_LOCK, _SEGMENTS = "owner.lock", "shared-memory.json"
# Shared memory in the map of a process's memory. A semaphore stands there by the name that it had while it was made.
_MAPPED = re.compile(r" (\d+) +/dev/shm/(?:psm_|sem\.)[^\s/]+(?: \(deleted\))?$", re.MULTILINE)
# What Python names them in the end.
_NAMES = ("psm_*", "sem.mp-*")


class PrivateFolder:
    """A folder that is locked for as long as its owner lives.

    A process id would not tell whether it lives, since containers that share their memory number processes apart.

    Attributes:
        path: of the folder.
    """

    def __init__(self, prefix: str, root: Path) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        # Named once it is locked: another run that starts now would take an open lock for an abandoned one.
        unnamed = self.path / f"{_LOCK}.new"
        self._lock = unnamed.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / _LOCK)

    def claim_shared_memory(self, processes: Iterable[int]) -> None:
        """Notes the shared memory and semaphores that Python has made for ``processes``: they go with the folder.

        Python's names for them do not tell whose they are, and a killed process leaves them behind.
        """
        (self.path / _SEGMENTS).write_text(json.dumps(mapped_shared_memory(processes)))

    def close(self) -> None:
        """Removes it."""
        _remove(self.path)
        self._lock.close()


def mapped_shared_memory(processes: Iterable[int]) -> dict[str, int]:
    """Returns: names of the shared memory and semaphores that ``processes`` have mapped, with their inodes."""
    inodes: set[int] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            inodes |= {int(inode) for inode in _MAPPED.findall(Path(f"/proc/{process}/maps").read_text())}
    found = {}
    for path in (path for pattern in _NAMES for path in SHARED_MEMORY.glob(pattern)):
        with contextlib.suppress(OSError):
            if (inode := path.stat().st_ino) in inodes:
                found[path.name] = inode
    return found


def sweep(prefix: str, roots: Iterable[Path]) -> bool:
    """Removes the folders ``prefix*`` in ``roots`` whose owners are gone, and the shared memory that they claimed.

    Returns: whether any is left, as its owner lives.
    """
    left = False
    for root in roots:
        for folder in root.glob(f"{prefix}*"):
            if _is_abandoned(folder):
                _remove(folder)
            else:
                left = True
    return left


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError, ValueError):
        for name, inode in json.loads((folder / _SEGMENTS).read_text()).items():
            segment = SHARED_MEMORY / name
            # By now the name may be another process's.
            with contextlib.suppress(OSError):
                if segment.stat().st_ino == inode:
                    segment.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    try:
        # What stands in another user's folder is not to be followed.
        if folder.stat().st_uid != os.getuid():
            return False
        with (folder / _LOCK).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False
    except OSError:
        # Not ours to open, or made this very moment and not locked yet.
        return False
