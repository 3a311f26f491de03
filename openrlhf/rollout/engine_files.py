"""The files of one engine: its sockets and temporary files in a folder of its own, and what it writes of its errors."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten

import psutil

from openrlhf.utils.private_folders import ENGINE_PREFIX, PrivateFolder, sweep

# Of a socket's path, in bytes, and of the names that vLLM gives its sockets.
_LONGEST_PATH, _SOCKET_NAME = 107, 36
_FOLDER_NAME = len(ENGINE_PREFIX) + 8
_ERRORS, _LOGGING = "errors.log", "logging.json"
_RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*(?:Error|Exception|Exit))(?:: (.+))?$", re.MULTILINE)
# What vLLM raises over an error of another process, which that one says elsewhere, or over its end, which nobody does.
_HANDED_ON = re.compile(
    r"initialization failed|Worker failed with error '(?P<cause>.*?)', please check the stack"
    r"|^cancelled$|^EngineCore encountered an issue"
)


class EngineFiles:
    """Where one engine's processes put their files; all of it goes when the engine ends, however it ends."""

    def __init__(self) -> None:
        roots = (Path(tempfile.gettempdir()), Path("/tmp"))
        sweep(ENGINE_PREFIX, roots)
        fits = _LONGEST_PATH - _SOCKET_NAME - _FOLDER_NAME - 2
        root = next((root for root in roots if len(os.fsencode(root)) <= fits), roots[0])
        self._folder = PrivateFolder(ENGINE_PREFIX, root)

    @property
    def path(self) -> Path:
        """The folder."""
        return self._folder.path

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """While it lasts, an engine that is started puts its files here, and what it then shares is claimed.

        vLLM reads where its log goes when it is imported, so the errors of a process that has done so are missing.
        """
        (self.path / _LOGGING).write_text(json.dumps(_logging_config(self.path / _ERRORS)))
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        with _environment(self._variables()):
            yield
        children = {child.pid for child in psutil.Process().children(recursive=True)}
        self._folder.claim_shared_memory(children - before)

    def _variables(self) -> dict[str, str]:
        variables = {"TMPDIR": str(self.path), "TORCHINDUCTOR_CACHE_DIR": _kernel_cache()}
        # What the user has set is kept.
        if "VLLM_RPC_BASE_PATH" not in os.environ:
            variables["VLLM_RPC_BASE_PATH"] = str(self.path)
        if "VLLM_LOGGING_CONFIG_PATH" not in os.environ and os.environ.get("VLLM_CONFIGURE_LOGGING", "1") == "1":
            variables["VLLM_LOGGING_CONFIG_PATH"] = str(self.path / _LOGGING)
        return variables

    def cause(self) -> str | None:
        """Returns: the first error that the engine's processes wrote, in a line; None where they wrote none."""
        with contextlib.suppress(OSError):
            return first_error((self.path / _ERRORS).read_text(errors="replace"))
        return None

    def close(self) -> None:
        """Removes what is left."""
        self._folder.close()


def first_error(log: str) -> str | None:
    """Returns: the first exception in a log with tracebacks, as "Kind: message", without those that hand on another."""
    for kind, message in _RAISED.findall(log):
        handed_on = _HANDED_ON.search(message)
        if handed_on is None:
            return shorten(f"{kind}: {message}" if message else kind, 300, placeholder=" ...")
        if handed_on["cause"]:
            return shorten(handed_on["cause"], 300, placeholder=" ...")
    return None


def describe_start(error: BaseException) -> str:
    """An error that vLLM met over its arguments or the model's config, in a line.

    A pydantic error of several lines holds the one that says what is wrong.
    """
    listed = getattr(error, "errors", None)
    first = next(iter(listed()), None) if callable(listed) else None
    if isinstance(first, dict) and "msg" in first:
        # vLLM lists all that it can run, which is hundreds of names.
        said = str(first["msg"]).removeprefix("Value error, ").partition(" Supported architectures")[0]
        where = ".".join(map(str, first.get("loc", ())))
        return shorten(f"{where}: {said}" if where else said, 300, placeholder=" ...")
    return shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")


def _kernel_cache() -> str:
    """Where compiled kernels lie: in the temporary folder of all runs, as they are worth keeping."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _logging_config(errors: Path) -> dict[str, object]:
    """vLLM's logging as it is by default, and beside it a file of errors, which all of its processes write."""
    level = os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper()
    stream = os.environ.get("VLLM_LOGGING_STREAM", "ext://sys.stdout")
    line = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
    console = {"class": "logging.StreamHandler", "formatter": "vllm", "level": level, "stream": stream}
    file = {"class": "logging.FileHandler", "level": "ERROR", "filename": str(errors), "delay": True}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "vllm": {"class": "vllm.logging_utils.NewLineFormatter", "datefmt": "%m-%d %H:%M:%S", "format": line}
        },
        "handlers": {"vllm": console, "errors": file},
        "loggers": {"vllm": {"handlers": ["vllm", "errors"], "level": level, "propagate": False}},
    }
