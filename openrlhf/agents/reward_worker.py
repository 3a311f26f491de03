"""The process that runs a user's reward function; ``reward_process.py`` is its other end.

Requests come pickled from the process that started this one. Answers go back as JSON: what a reward function may have
executed for a model is never unpickled by the trainer.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from openrlhf.agents.reward_values import RewardFormError, RewardResult, read_rewards

FUNCTION = "reward_func"
HEADER = struct.Struct("!I")


class RewardFileError(Exception):
    """The file cannot be used; the message is one sentence."""


def main() -> None:
    """Command line: the reward file, the file descriptor of the socket, and the parent's process id."""
    path, descriptor, parent = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    channel = socket.socket(fileno=descriptor)
    # Programs that the function starts must not hold the channel open after this process is gone.
    channel.set_inheritable(False)
    try:
        function = load_reward_func(path)
    except RewardFileError as error:
        _send(channel, {"error": str(error)})
        return
    is_async = _is_async(function)
    _send(channel, {"batched": bool(getattr(function, "batched", False)), "async": is_async})
    if is_async:
        asyncio.run(_serve_async(function, channel, path))
    else:
        _serve(function, channel, path)
    sys.stdout.flush()
    sys.stderr.flush()
    _end_group()


def load_reward_func(path: Path) -> Callable[..., Any]:
    """Imports the file and takes its ``reward_func``; files beside it can be imported by it.

    Raises: RewardFileError.
    """
    if not path.is_file():
        raise RewardFileError(f"{path} is not a file")
    sys.path.insert(0, str(path.parent))
    name = f"reward_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RewardFileError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RewardFileError(f"{path} cannot be imported: {describe(error, path)}") from error
    function = getattr(module, FUNCTION, None)
    if not callable(function):
        raise RewardFileError(f"{path} has no function {FUNCTION}(queries, prompts, labels)")
    try:
        inspect.signature(function).bind([], [], [])
    except TypeError as error:
        reason = f"{FUNCTION} in {path} cannot be called with (queries, prompts, labels): {error}"
        raise RewardFileError(reason) from error
    return function


def describe(error: BaseException, path: Path) -> str:
    """One line: the error, where it was raised, and the last line of the user's file on the way there."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename) == path]
    places = own[-1:] + [frame for frame in frames[-1:] if own and frame is not own[-1]]
    trail = ", then ".join(f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in places)
    return f"{type(error).__name__}: {error}" + (f" (at {trail})" if trail else "")


def overdue(timeout: float) -> str:
    """Says that a call took longer than ``timeout`` seconds."""
    return f"{FUNCTION} took longer than {timeout:g} s (--reward.timeout)"


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _answer(returned: Any, count: int) -> list[dict[str, Any]]:
    outcomes = read_rewards(returned, count)
    return [asdict(o) if isinstance(o, RewardResult) else {"failure": o.reason} for o in outcomes]


def _failure(error: BaseException, path: Path) -> str:
    if isinstance(error, RewardFormError):
        return f"{FUNCTION} in {path} returned something unusable: {error}"
    return f"{FUNCTION} raised {describe(error, path)}"


def _serve(function: Callable[..., Any], channel: socket.socket, path: Path) -> None:
    """Answers one request after the other, in the main thread: some checkers need signals."""
    while (request := _receive(channel)) is not None:
        try:
            returned = function(*request["columns"])
            if inspect.isawaitable(returned):
                returned = asyncio.run(_wait_for(returned))
            reply = {"items": _answer(returned, len(request["columns"][0]))}
        except (Exception, SystemExit) as error:
            reply = {"error": _failure(error, path)}
        _send(channel, {"id": request["id"], **reply})


async def _serve_async(function: Callable[..., Any], channel: socket.socket, path: Path) -> None:
    """Runs every request as a task; a request with ``cancel`` ends the task of that id."""
    reader, writer = await asyncio.open_unix_connection(sock=channel)
    tasks: dict[int, asyncio.Task[None]] = {}

    async def run(request: dict[str, Any]) -> None:
        deadline = asyncio.timeout(request["timeout"])
        try:
            async with deadline:
                returned = await function(*request["columns"])
            reply = {"items": _answer(returned, len(request["columns"][0]))}
        except (Exception, SystemExit) as error:
            reply = {"error": overdue(request["timeout"]) if deadline.expired() else _failure(error, path)}
        finally:
            tasks.pop(request["id"], None)
        writer.write(_pack(json.dumps({"id": request["id"], **reply}).encode()))

    while True:
        try:
            size = HEADER.unpack(await reader.readexactly(HEADER.size))[0]
            request = pickle.loads(await reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        if "cancel" in request:
            if task := tasks.get(request["cancel"]):
                task.cancel()
            continue
        tasks[request["id"]] = asyncio.create_task(run(request))


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


def _pack(payload: bytes) -> bytes:
    return HEADER.pack(len(payload)) + payload


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(_pack(json.dumps(message).encode()))


def _receive(channel: socket.socket) -> dict[str, Any] | None:
    """Returns: the next request, or None once the other end is closed."""
    header = _read_exactly(channel, HEADER.size)
    payload = header and _read_exactly(channel, HEADER.unpack(header)[0])
    return pickle.loads(payload) if payload else None


def _read_exactly(channel: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        try:
            part = channel.recv(size - len(data))
        except ConnectionError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)


def _end_with_parent(parent: int) -> None:
    """Ends this process, and what it started, soon after its parent is gone, even in the middle of a call."""
    while os.getppid() == parent:
        time.sleep(1.0)
    _end_group()


def _end_group() -> None:
    os.killpg(0, signal.SIGKILL)
