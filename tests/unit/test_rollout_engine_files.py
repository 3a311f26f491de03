"""What an engine leaves on disk and in shared memory goes with it, and what it says of its errors reaches the user."""

from __future__ import annotations

import json
import logging.config
import os
import socket
import subprocess
import sys
import tempfile
from multiprocessing import shared_memory
from pathlib import Path
from uuid import uuid4

import pytest
from pydantic import BaseModel, ValidationError, field_validator

from openrlhf.rollout.engine_files import EngineFiles, describe_start, first_error
from openrlhf.utils.private_folders import ENGINE_PREFIX, SHARED_MEMORY, PrivateFolder, sweep

SPAWNED = """
(EngineCore pid=1) ERROR 11-29 [core.py:1510] EngineCore failed to start.
Traceback (most recent call last):
  File "model.py", line 3, in __init__
    raise ValueError("heads of 16 are not supported")
ValueError: heads of 16 are not supported

The above exception was the direct cause of the following exception:

RuntimeError: WorkerProc initialization failed due to an exception in a background process.
"""


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (SPAWNED, "ValueError: heads of 16 are not supported"),
        ("", None),
        ("INFO all is well: 3 Errors: none", None),
        ("torch.OutOfMemoryError: CUDA out of memory", "OutOfMemoryError: CUDA out of memory"),
        ("  assert x\nAssertionError\n", "AssertionError"),
        ("RuntimeError: Engine core initialization failed. See root cause above.", None),
        ("RuntimeError: cancelled", None),
        ("EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.", None),
        ("RuntimeError: cancelled\nValueError: the request was cancelled", "ValueError: the request was cancelled"),
        ("RuntimeError: Worker failed with error 'no kernel', please check the stack trace above", "no kernel"),
    ],
)  # fmt: skip
def test_the_cause_is_the_first_error_that_is_not_handed_on(log: str, said: str | None) -> None:
    assert first_error(log) == said


def test_a_long_cause_is_shortened() -> None:
    said = first_error("ValueError: " + "x " * 400)
    assert said is not None and 250 < len(said) <= 300 and said.endswith("x ...")


class _Model(BaseModel):
    architecture: str

    @field_validator("architecture")
    @classmethod
    def known(cls, value: str) -> str:
        raise ValueError(
            f"Model architectures [{value!r}] are not supported for now. Supported architectures: ['A', 'B']"
        )


def test_an_error_of_several_lines_is_told_by_what_was_wrong() -> None:
    with pytest.raises(ValidationError) as caught:
        _Model(architecture="Odd")
    assert describe_start(caught.value) == "architecture: Model architectures ['Odd'] are not supported for now."
    assert describe_start(TypeError("unexpected\n keyword 'x'")) == "TypeError: unexpected keyword 'x'"


def test_children_put_their_files_into_the_folder_and_this_process_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/chosen")
    monkeypatch.delenv("VLLM_LOGGING_CONFIG_PATH", raising=False)
    before = dict(os.environ)
    files = EngineFiles()
    with files.starting():
        ask = "import os, tempfile; print(tempfile.gettempdir(), os.environ['VLLM_RPC_BASE_PATH'])"
        said = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
        assert said == [str(files.path), "/chosen"], "what the user has set is kept"
        assert os.environ["VLLM_LOGGING_CONFIG_PATH"].startswith(str(files.path))
    # Torch itself sets the folder of its kernels for good.
    assert {**os.environ, "TORCHINDUCTOR_CACHE_DIR": ""} == {**before, "TORCHINDUCTOR_CACHE_DIR": ""}
    assert tempfile.gettempdir() != str(files.path)
    files.close()
    assert not files.path.exists()


def test_a_socket_fits_into_the_folder_even_where_the_temporary_folder_has_a_long_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("x" * 60) / ("y" * 60)
    long.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    files = EngineFiles()
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(files.path / str(uuid4())))
    finally:
        files.close()


def test_errors_of_the_engines_logger_are_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_CONFIG_PATH", raising=False)
    files = EngineFiles()
    assert files.cause() is None
    with files.starting():
        config = json.loads(Path(os.environ["VLLM_LOGGING_CONFIG_PATH"]).read_text())
    # The formatter of the console is vLLM's own, which needs vLLM.
    config["formatters"]["vllm"].pop("class")
    config["loggers"] = {"engine of a test": config["loggers"]["vllm"]}
    logging.config.dictConfig(config)
    try:
        logging.getLogger("engine of a test").error("no cause: Error")
        try:
            raise OSError("no space left")
        except OSError:
            logging.getLogger("engine of a test").exception("EngineCore failed to start.")
        assert files.cause() == "OSError: no space left"
    finally:
        for handler in logging.getLogger("engine of a test").handlers:
            handler.close()
        files.close()


_KILLED = """
import multiprocessing, os, signal, sys
from multiprocessing import shared_memory
from pathlib import Path
from openrlhf.utils.private_folders import ENGINE_PREFIX, PrivateFolder
segment = shared_memory.SharedMemory(create=True, size=4096)
semaphore = multiprocessing.get_context("spawn").Semaphore()
folder = PrivateFolder(ENGINE_PREFIX, Path(sys.argv[1]))
folder.claim_shared_memory([os.getpid()])
print(segment.name, f"sem.{semaphore._semlock.name.lstrip('/')}", flush=True)
sys.stdin.readline()
"""


def test_shared_memory_that_a_killed_process_claimed_goes_with_its_folder_and_other_stays(tmp_path: Path) -> None:
    other = shared_memory.SharedMemory(create=True, size=4096)
    # In a session of its own, so that Python's own tracker of shared memory can be killed along, as Ray does.
    child = subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        made = [SHARED_MEMORY / name for name in child.stdout.readline().split()]
        assert sweep(ENGINE_PREFIX, [tmp_path])
        assert len(made) == 2 and all(path.exists() for path in made), "their owner lives"
        assert len(list(tmp_path.iterdir())) == 1
        os.killpg(child.pid, 9)
        child.wait(30)
        assert all(path.exists() for path in made), "a killed process leaves them behind"
        assert not sweep(ENGINE_PREFIX, [tmp_path])
        assert not any(path.exists() for path in made) and list(tmp_path.iterdir()) == []
        assert (SHARED_MEMORY / other.name).exists()
    finally:
        child.stdin.close()
        child.stdout.close()
        other.close()
        other.unlink()


def test_a_name_that_another_process_has_taken_over_is_left_alone(tmp_path: Path) -> None:
    segment = shared_memory.SharedMemory(create=True, size=4096)
    folder = PrivateFolder(ENGINE_PREFIX, tmp_path)
    (folder.path / "shared-memory.json").write_text(json.dumps({segment.name: 1, "psm_none": 2}))
    folder.close()
    assert (SHARED_MEMORY / segment.name).exists() and not folder.path.exists()
    segment.close()
    segment.unlink()
