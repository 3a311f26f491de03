"""Keeps two runs from writing into one folder at the same time."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from openrlhf.config.errors import ConfigError

LOCK_FILE = ".lock"

# What file systems answer that know no such locks, some kinds of NFS among them.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class RunLock:
    """Holds ``<folder>/.lock`` while the body runs; the system lets go of it when the process ends, however it ends.

    The file says who holds it: a process id and a host. It is removed at the end.
    """

    def __init__(self, folder: str | Path, *, flag: str, warn: Callable[[str], None]) -> None:
        """Args:
        folder: made where it is missing.
        flag: the flag that names the folder, for messages.
        warn: receives a sentence where the file system knows no locks; the body then runs without one.
        """
        self._folder = Path(folder)
        self._flag = flag
        self._warn = warn
        self._file: int | None = None

    def __enter__(self) -> RunLock:
        """Raises: ConfigError, where another run holds the folder, or the folder or the file cannot be written."""
        try:
            return self._enter()
        except OSError as error:
            raise ConfigError(
                f"{self._flag} {self._folder} cannot be written to: {error.strerror or error}; make room there, or "
                "name another folder."
            ) from error

    def _enter(self) -> RunLock:
        self._folder.mkdir(parents=True, exist_ok=True)
        while self._file is None:
            file = os.open(self._folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if not self._take(file):
                    return self
                if self._is_current(file):
                    os.ftruncate(file, 0)
                    os.pwrite(file, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
                    self._file = file
            finally:
                if self._file is None:
                    os.close(file)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            # Before it is let go: whoever waits for this file finds that it is gone and makes another.
            (self._folder / LOCK_FILE).unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def _take(self, file: int) -> bool:
        """Returns: False where the file system knows no locks."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, 200, 0).decode(errors="replace").split()
            who = f"process {holder[0]} on {holder[1]}" if len(holder) == 2 else "another process"
            raise ConfigError(
                f"{self._flag} {self._folder}: another run ({who}) writes there now; give this one a folder of its "
                "own, or wait for the end of the other."
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self._warn(
                f"{self._flag} {self._folder} lies on a file system without locks ({error.strerror}), so that nothing "
                "keeps a second run from writing there too"
            )
            return False
        return True

    def _is_current(self, file: int) -> bool:
        """Whether the locked file still stands in the folder: its last holder may have removed it meanwhile."""
        try:
            return os.path.samestat(os.fstat(file), os.stat(self._folder / LOCK_FILE))
        except FileNotFoundError:
            return False
