"""The reward-model server as a process: what `serve_rm` runs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import transformers
import uvicorn

from openrlhf.config import ConfigError, ServeRMConfig
from openrlhf.config.api_keys import server_key
from openrlhf.serve.app import Limits, RewardApp
from openrlhf.serve.metrics import ServerMetrics
from openrlhf.serve.model import RewardModel
from openrlhf.serve.requests import Gate
from openrlhf.serve.worker import ScoringWorker
from openrlhf.utils.devices import choose_device
from openrlhf.utils.termination import Terminated

BACKLOG = 2048
# Bodies of the largest size that may be held at one time, before they are token ids; of smaller ones as many as fit.
HELD_BODIES = 16
# Longer than clients keep their connections: one that the server closes just when a client sends is a failed request.
KEEP_ALIVE_S = 75
# After the last answer, for connections to close.
CLOSING_S = 5
# Of a request line and its headers, as other servers bound them.
HEAD_BYTES = 64 * 1024


class RewardServer(uvicorn.Server):
    """Serves until a signal comes or the worker ends; after a signal, until what was accepted is answered.

    Attributes:
        worker: what scores.
        gate: what lets requests in.
        signals: those that came.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        worker: ScoringWorker[RewardModel],
        gate: Gate,
        *,
        ready_line: str,
        stop_timeout: float,
    ) -> None:
        """
        Args:
            ready_line: printed once the model is loaded.
            stop_timeout: seconds from the first signal to the end.
        """
        super().__init__(config)
        self.signals: list[int] = []
        self.worker = worker
        self.gate = gate
        self._ready_line: str | None = ready_line
        self._stop_timeout = stop_timeout
        self._deadline = float("inf")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Lets no further request in; a second signal waits for none."""
        self._deadline = 0.0 if self.signals else time.monotonic() + self._stop_timeout
        self.signals.append(sig)
        self.gate.closing.set()

    async def on_tick(self, counter: int) -> bool:
        """Asked by uvicorn ten times a second. Returns: whether the server is to end."""
        ends = await super().on_tick(counter)
        if self._ready_line is not None and self.worker.ready:
            print(self._ready_line, flush=True)
            self._ready_line = None
        if self.worker.ended.done():
            return True
        if not self.signals:
            return ends
        if time.monotonic() < self._deadline:
            return not self.gate.requests
        # What is accepted still gets an answer: that there is none.
        await asyncio.to_thread(self.worker.stop, 0.0)
        return True


def listen(host: str, port: int) -> socket.socket:
    """Opens the socket before anything heavy is started.

    Raises: ConfigError where the address cannot be had.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        # The socket's own text repeats the address; a name that cannot be resolved has no number of this kind.
        reason = os.strerror(error.errno) if (error.errno or 0) > 0 else error.strerror
        raise ConfigError(f"--host {host} --port {port}: cannot listen there ({reason}); take another.") from error


def make_server(config: ServeRMConfig, load: Callable[[], RewardModel], *, ready_line: str) -> RewardServer:
    """Puts a server together; its worker is not started yet.

    Args:
        load: gives the model; called in the worker's thread.
        ready_line: printed once the model is loaded.
    """
    body_bytes = config.max_body_mb * 2**20
    metrics, gate = ServerMetrics(), Gate(config.max_waiting_texts, HELD_BODIES * body_bytes)
    worker = ScoringWorker(load, metrics, max_tokens=config.max_batch_tokens, max_rows=config.batch_size)
    limits = Limits(body_bytes=body_bytes, key=server_key(config.api_key_file, config.api_key_env))
    settings = uvicorn.Config(
        RewardApp(worker, gate, metrics, limits).asgi,
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        # Of uvicorn's parsers the one that bounds what stands before a body; the other holds any header whole.
        http="h11",
        h11_max_incomplete_event_size=HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSING_S,
    )
    return RewardServer(settings, worker, gate, ready_line=ready_line, stop_timeout=config.stop_timeout)


async def serve(server: RewardServer, listener: socket.socket) -> None:
    """Serves on an open socket until a signal comes or the worker ends.

    Raises: what the worker ended with.
    """
    server.worker.start()
    try:
        await server.serve(sockets=[listener])
    finally:
        listener.close()
        await asyncio.to_thread(server.worker.stop, CLOSING_S)
    if server.worker.ended.done():
        server.worker.ended.result()


def run(config: ServeRMConfig) -> None:
    """Serves a reward model until a signal comes.

    Raises:
        ConfigError: the model cannot be loaded, or the address cannot be had.
        RunError: the model can run nothing any more.
        Terminated, KeyboardInterrupt: a signal came, and what was accepted before it is answered.
    """
    transformers.utils.logging.disable_progress_bar()
    path, device = config.reward.model_name_or_path, choose_device(config.device)

    def load() -> RewardModel:
        return RewardModel.load(
            path,
            ds=config.ds,
            device=device,
            max_len=config.data.max_len,
            normalize=config.reward.normalize_enable,
            use_fast_tokenizer=not config.data.disable_fast_tokenizer,
            trust_remote_code=config.trust_remote_code,
        )

    host = f"[{config.host}]" if ":" in config.host else config.host
    line = f"{path} on {device} in {config.ds.param_dtype}: http://{host}:{config.port}/get_reward"
    server = make_server(config, load, ready_line=line)
    asyncio.run(serve(server, listen(config.host, config.port)))
    if server.signals:
        raise Terminated if server.signals[0] == signal.SIGTERM else KeyboardInterrupt
