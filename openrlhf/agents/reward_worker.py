"""The process that runs a user's reward function; ``reward_process.py`` is its other end.

Requests come pickled from the process that started this one. Answers go back as JSON: what a reward function may have
executed for a model is never unpickled by the trainer.
"""

from __future__ import annotations

import asyncio
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
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from openrlhf.agents.reward_values import RewardFormError, RewardResult, read_rewards
from openrlhf.agents.user_file import UserFileError, describe, import_file

FUNCTION = "reward_func"
HEADER = struct.Struct("!I")


def main() -> None:
    """Command line: the reward file, the file descriptor of the socket, and the parent's process id."""
    path, descriptor, parent = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    channel = socket.socket(fileno=descriptor)
    # Programs that the function starts must not hold the channel open after this process is gone.
    channel.set_inheritable(False)
    try:
        function = load_reward_func(path)
    except UserFileError as error:
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

    Raises: UserFileError.
    """
    sys.path.insert(0, str(path.parent))
    module = import_file(path, f"reward_file_{path.stem}")
    function = getattr(module, FUNCTION, None)
    if not callable(function):
        raise UserFileError(f"{path} has no function {FUNCTION}(queries, prompts, labels)")
    try:
        inspect.signature(function).bind([], [], [])
    except TypeError as error:
        reason = f"{FUNCTION} in {path} cannot be called with (queries, prompts, labels): {error}"
        raise UserFileError(reason) from error
    return function


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
        except BaseException as error:
            reply = {"error": _failure(error, path)}
        _send(channel, {"id": request["id"], **reply})


async def _serve_async(function: Callable[..., Any], channel: socket.socket, path: Path) -> None:
    """Runs every request as a task; a request with ``cancel`` ends the task of that id."""
    reader, writer = await asyncio.open_unix_connection(sock=channel)
    tasks: dict[int, asyncio.Task[None]] = {}
    cancelled: set[int] = set()

    async def run(request: dict[str, Any]) -> None:
        deadline = asyncio.timeout(request["timeout"])
        try:
            async with deadline:
                returned = await function(*request["columns"])
            reply = {"items": _answer(returned, len(request["columns"][0]))}
        except BaseException as error:
            # Any other error is the function's, a CancelledError of its own too: unanswered, it would use up the
            # whole time-out.
            if request["id"] in cancelled:
                return
            reply = {"error": overdue(request["timeout"]) if deadline.expired() else _failure(error, path)}
        finally:
            tasks.pop(request["id"], None)
            cancelled.discard(request["id"])
        writer.write(_pack(json.dumps({"id": request["id"], **reply}).encode()))

    while True:
        try:
            size = HEADER.unpack(await reader.readexactly(HEADER.size))[0]
            request = pickle.loads(await reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        if "cancel" in request:
            if task := tasks.get(request["cancel"]):
                cancelled.add(request["cancel"])
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
