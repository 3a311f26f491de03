"""Ends what is left of a local Ray whose driver was killed, and removes the files of its engines.

Ray's raylet dies with the driver, but its agents first wait up to a minute for a head that will not come back. This
module runs as a process of its own: it notices the driver's end by the end of its standard input.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from openrlhf.utils.private_folders import ENGINE_PREFIX, SHARED_MEMORY, WEIGHTS_PREFIX, sweep

# Where this package lies, which the reaper's own path need not hold.
_ROOT = str(Path(__file__).resolve().parents[2])
_GRACE_S = 5.0
# Engines look for their owner every second, and hold what they share until they have ended.
_SWEEP_S = 10.0


def start_reaper() -> subprocess.Popen[bytes]:
    """Starts the reaper for all present children of this process, Ray's own among them.

    Returns:
        The process; it ends by itself when this one does, or when its ``stdin`` is closed.
    """
    members = [f"{p.pid}:{p.create_time()!r}" for p in psutil.Process().children(recursive=True)]
    return subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), *members],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))},
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
    """Waits for the end of standard input, gives the members time to end, kills the rest, and tidies up."""
    sys.stdin.buffer.read()
    left = [process for member in members if (process := _alive(member)) is not None]
    _, left = psutil.wait_procs(left, timeout=_GRACE_S)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    deadline = time.monotonic() + _SWEEP_S
    disks = {Path(tempfile.gettempdir()), Path("/tmp")}
    while sweep(ENGINE_PREFIX, disks) | sweep(WEIGHTS_PREFIX, {SHARED_MEMORY, *disks}):
        if time.monotonic() > deadline:
            break
        time.sleep(0.5)


if __name__ == "__main__":
    main(sys.argv[1:])
