"""Ends what is left of a local Ray whose driver was killed.

Ray's raylet dies with the driver, but its agents first wait up to a minute for a head that will not come back. This
module runs as a process of its own: it notices the driver's end by the end of its standard input.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import psutil

_GRACE_S = 5.0


def start_reaper() -> subprocess.Popen[bytes]:
    """Starts the reaper for all present children of this process, Ray's own among them.

    Returns:
        The process; it ends by itself when this one does, or when its ``stdin`` is closed.
    """
    members = [f"{p.pid}:{p.create_time()!r}" for p in psutil.Process().children(recursive=True)]
    return subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), *members],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Ctrl-C goes to the whole session of a terminal, and the reaper has to outlive the others.
        start_new_session=True,
    )


def _alive(member: str) -> psutil.Process | None:
    """The process where it still runs; a process id alone may by now belong to somebody else."""
    pid, _, created = member.partition(":")
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(int(pid))
        if process.create_time() == float(created):
            return process
    return None


def main(members: list[str]) -> None:
    """Waits for the end of standard input, gives the members time to end by themselves, and kills the rest."""
    sys.stdin.buffer.read()
    left = [process for member in members if (process := _alive(member)) is not None]
    _, left = psutil.wait_procs(left, timeout=_GRACE_S)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()


if __name__ == "__main__":
    main(sys.argv[1:])
