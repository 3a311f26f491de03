"""One process that runs a user's reward function, as seen by the process that started it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from openrlhf.agents.reward_worker import FUNCTION, HEADER, overdue
from openrlhf.config.errors import ConfigError

# An async function is called this many times at once in one process.
ASYNC_CALLS = 64
# A process that should have ended an overdue async call by itself gets this long to say so.
GRACE_S = 2.0
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); import openrlhf.agents.reward_worker as w; w.main()"
)


class CallFailed(Exception):
    """The call gave no rewards; the message says why."""


class Bystander(Exception):
    """The process was ended because of another call, so this one may simply be made again."""


class RewardProcess:
    """A running reward process.

    Attributes:
        alive: it can take calls.
        load: calls that were given to it and have not ended.
        batched: the function declared ``batched = True``.
        capacity: calls that it can take at once.
    """

    def __init__(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        self._path = path
        self._process = process
        self._ids = itertools.count()
        self._pending: dict[int, asyncio.Future[list[dict[str, Any]]]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.alive = True
        self.load = 0
        self.batched = False
        self.capacity = 1

    @classmethod
    async def start(cls, path: Path, timeout: float) -> RewardProcess:
        """Starts a process and waits until it has imported the file.

        Raises: ConfigError, where the file cannot be used or takes more than ``timeout`` seconds to import.
        """
        ours, theirs = socket.socketpair()
        try:
            arguments = [json.dumps(sys.path), str(path), str(theirs.fileno()), str(os.getpid())]
            process = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOT, *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # A group of its own, so that killing it ends the programs that the function started as well.
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self = cls(path, process)
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        try:
            async with asyncio.timeout(timeout):
                hello = await self._read()
        except TimeoutError as error:
            self.stop()
            raise ConfigError(f"--reward.remote_url {path}: importing it took longer than {timeout:g} s") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            self.stop()
            raise ConfigError(f"--reward.remote_url {path}: {self._ending()} while importing it") from error
        except BaseException:
            self.stop()
            raise
        if "error" in hello:
            self.stop()
            raise ConfigError(f"--reward.remote_url: {hello['error']}")
        self.batched = hello["batched"]
        self.capacity = ASYNC_CALLS if hello["async"] else 1
        self._tasks = [asyncio.create_task(self._read_answers()), asyncio.create_task(self._watch())]
        return self

    async def call(self, columns: tuple[list[str], list[str], list[Any]], timeout: float) -> list[dict[str, Any]]:
        """Calls the function with (queries, prompts, labels).

        Returns: for each sample the fields of a ``RewardResult``, or ``{"failure": reason}``.

        Raises: CallFailed, Bystander.
        """
        if not self.alive:
            raise Bystander
        number = next(self._ids)
        future = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"id": number, "columns": columns, "timeout": timeout})
            async with asyncio.timeout(timeout if self.capacity == 1 else timeout + GRACE_S):
                return await future
        except TimeoutError as error:
            if not self.alive:
                # A call that blocks an async function's loop makes all others overdue: the first one answers for it.
                raise Bystander from error
            # Only the whole process can be ended: the call does not give way by itself.
            self.stop()
            raise CallFailed(overdue(timeout)) from error
        except asyncio.CancelledError:
            if self.capacity == 1:
                self.stop()
            elif self.alive:
                self._send({"cancel": number})
            raise
        finally:
            self._pending.pop(number, None)

    def stop(self) -> None:
        """Kills the process with all that it started; calls under way become bystanders."""
        self._end(Bystander())

    def _end(self, reason: Exception) -> None:
        if not self.alive:
            return
        self.alive = False
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait(timeout=10)
        self._writer.close()
        for task in self._tasks:
            task.cancel()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(reason)

    def _ending(self) -> str:
        code = self._process.wait(timeout=1)
        how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
        return f"the process of {FUNCTION} {how}"

    def _send(self, request: dict[str, Any]) -> None:
        payload = pickle.dumps(request)
        self._writer.write(HEADER.pack(len(payload)) + payload)

    async def _read(self) -> dict[str, Any]:
        size = HEADER.unpack(await self._reader.readexactly(HEADER.size))[0]
        return json.loads(await self._reader.readexactly(size))

    async def _read_answers(self) -> None:
        try:
            while True:
                answer = await self._read()
                future = self._pending.get(answer["id"])
                if future is None or future.done():
                    continue
                if "error" in answer:
                    future.set_exception(CallFailed(answer["error"]))
                else:
                    future.set_result(answer["items"])
        except (asyncio.IncompleteReadError, ConnectionError):
            self._lost()

    async def _watch(self) -> None:
        # A program that the function started may hold the channel open, so its end alone does not tell.
        while self._process.poll() is None:
            await asyncio.sleep(0.5)
        self._lost()

    def _lost(self) -> None:
        if not self.alive:
            return
        try:
            ending = self._ending()
        except subprocess.TimeoutExpired:
            ending = f"the process of {FUNCTION} closed its channel"
        self._end(CallFailed(ending))
