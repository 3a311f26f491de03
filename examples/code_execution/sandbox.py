"""Runs code that a model wrote: another process, without a network, within limits, in a folder that is thrown away.

It keeps accidents and simple tricks in. It does not hide files that this user can read, nor protect those that this
user can write: run training that executes code in a container or as a user who owns nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

# User and process namespaces of its own come with the empty network: what is started inside dies with it.
ISOLATE = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"]
MEMORY_BYTES = 512 * 2**20
FILE_BYTES = 2**20
OPEN_FILES = 64
PROCESSES = 16
OUTPUT_CHARACTERS = 2000

_LIMITED = """
import os, resource, sys
for name, value in zip(("AS", "FSIZE", "NOFILE", "NPROC", "CPU", "CORE"), map(int, sys.argv[1:7])):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
os.execv(sys.executable, [sys.executable, "-I", *sys.argv[7:]])
"""
# A verdict counts with the secret alone, so that a solution cannot pass by ending the process early.
_HARNESS = """
import json, os, sys, traceback
secret, tests = json.loads(sys.stdin.readline())
verdicts = os.fdopen(int(sys.argv[1]), "w")
space = {"__name__": "solution"}
exec(compile(open("solution.py", encoding="utf-8").read(), "solution.py", "exec"), space)
for number, test in enumerate(tests):
    try:
        exec(test, dict(space))
    except Exception:
        traceback.print_exc()
        continue
    print(secret, number, file=verdicts, flush=True)
"""


class SandboxUnavailable(RuntimeError):
    """This machine cannot keep a process from the network, so nothing is run."""


@dataclass(frozen=True)
class Result:
    """What became of a solution.

    Attributes:
        passed: how many of its tests.
        timed_out: it ran out of time.
        output: the end of what it wrote, errors included.
    """

    passed: int
    timed_out: bool
    output: str


def require_isolation() -> None:
    """Raises: SandboxUnavailable, where a process cannot be given a network namespace of its own."""
    remedy = "enable user namespaces, or run as root in a container that allows them (docker: --cap-add=SYS_ADMIN)"
    if shutil.which(ISOLATE[0]) is None:
        raise SandboxUnavailable("no program `unshare` (util-linux), so code would run with a network: install it")
    try:
        tried = subprocess.run([*ISOLATE, "true"], capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        raise SandboxUnavailable(f"`unshare` does not end, so code is not run: {remedy}") from None
    if tried.returncode != 0:
        raise SandboxUnavailable(f"{tried.stderr.strip() or 'unshare failed'}, so code is not run: {remedy}")


def run_tests(solution: str, tests: list[str], *, timeout: float = 5.0) -> Result:
    """Runs ``solution`` and then each test, a piece of Python that raises where it fails.

    Args:
        timeout: seconds for all of them, also the limit of processor time.
    """
    secret = secrets.token_hex(16)
    cpu = max(1, int(timeout) + 1)
    limits = [MEMORY_BYTES, FILE_BYTES, OPEN_FILES, PROCESSES, cpu, 0]
    with contextlib.ExitStack() as stack:
        # A solution may leave behind what cannot be removed.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sandbox", ignore_cleanup_errors=True))
        # Files without a name, not pipes: their size is limited, nobody has to read them while the process runs, and
        # the solution cannot remove them.
        verdicts, output = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        (Path(folder) / "solution.py").write_text(solution, encoding="utf-8", errors="replace")
        (Path(folder) / "harness.py").write_text(_HARNESS, encoding="utf-8")
        process = subprocess.Popen(
            [*ISOLATE, sys.executable, "-I", "-c", _LIMITED, *map(str, limits), "harness.py", str(verdicts.fileno())],
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[verdicts.fileno()],
            start_new_session=True,
            text=True,
        )
        timed_out = _wait(process, json.dumps([secret, tests]) + "\n", timeout)
        passed = {line for line in _content(verdicts).splitlines() if line.startswith(secret)}
        written = _content(output)[-OUTPUT_CHARACTERS:]
    return Result(min(len(passed), len(tests)), timed_out, written)


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _wait(process: subprocess.Popen[str], request: str, timeout: float) -> bool:
    """Returns: whether the process had to be killed."""
    try:
        process.communicate(request, timeout=timeout)
        return False
    except subprocess.TimeoutExpired:
        return True
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
