"""One folder, one run: the second is told who holds it, and a holder that died holds nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf.config import ConfigError
from openrlhf.utils.run_lock import LOCK_FILE, RunLock

HOLDER = (
    "import sys, time\n"
    "from openrlhf.utils.run_lock import RunLock\n"
    "with RunLock(sys.argv[1], flag='--ckpt.output_dir', warn=print):\n"
    "    print('held', flush=True)\n"
    "    sys.stdin.read()\n"
)


def lock(folder: Path, said: list[str] | None = None) -> RunLock:
    return RunLock(folder, flag="--ckpt.output_dir", warn=(said if said is not None else []).append)


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "out")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate(timeout=30)


def test_a_second_run_is_refused_with_the_folder_and_the_process_that_holds_it(holder, tmp_path):
    with pytest.raises(ConfigError) as caught, lock(tmp_path / "out"):
        pass
    assert f"--ckpt.output_dir {tmp_path / 'out'}: another run (process {holder.pid} on {socket.gethostname()})" in str(
        caught.value
    )
    with lock(tmp_path / "other"):
        pass


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None])
def test_the_folder_is_free_as_soon_as_its_holder_has_ended_in_whatever_way(how, holder, tmp_path):
    if how is None:
        holder.communicate("", timeout=30)
    else:
        holder.send_signal(how)
        holder.wait(30)
    with lock(tmp_path / "out"):
        assert (tmp_path / "out" / LOCK_FILE).read_text().split()[0] == str(os.getpid())


def test_a_run_that_is_over_leaves_no_file_and_a_failed_one_neither(tmp_path):
    with lock(tmp_path):
        assert (tmp_path / LOCK_FILE).is_file()
    with pytest.raises(ZeroDivisionError), lock(tmp_path):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_one_process_cannot_hold_a_folder_twice_either_and_the_first_hold_stays(tmp_path):
    with lock(tmp_path):
        for _ in range(2):
            with pytest.raises(ConfigError, match=f"process {os.getpid()} "), lock(tmp_path):
                pass


def test_a_file_that_its_last_holder_removed_while_it_was_opened_is_not_taken_for_the_lock(tmp_path, monkeypatch):
    """Two runs would hold two files of one name: the one that was removed, and the one that stands there."""
    real, first = fcntl.flock, lock(tmp_path)
    first.__enter__()

    def flock(file: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        first.__exit__(None, None, None)
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock(tmp_path), pytest.raises(ConfigError, match="another run"), lock(tmp_path):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_a_warning(number, tmp_path, monkeypatch):
    """No such file system stands here, so its answer is put in its place."""

    def flock(file: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    said: list[str] = []
    with lock(tmp_path, said), lock(tmp_path, said):
        pass
    assert len(said) == 2 and f"{tmp_path} lies on a file system without locks" in said[0]


def test_a_folder_that_cannot_be_made_is_named_with_its_flag(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"--\S+ .*/file/out cannot be written to: Not a directory"),
        lock(tmp_path / "file" / "out"),
    ):
        pass
