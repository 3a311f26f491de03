"""Reward servers for tests: a tiny reward model, and the whole server inside of the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import torch
from transformers import AutoModelForSequenceClassification

from openrlhf.config import ServeRMConfig
from openrlhf.serve.model import RewardModel
from openrlhf.serve.server import RewardServer, listen, make_server, serve
from tests.tiny_models import make_tiny_model

MEAN, STD = 0.5, 2.0
DEADLINE_S = 60


def make_reward_model(folder: Path, architecture: str = "qwen2", **changes: Any) -> Path:
    """Writes a tiny reward model with statistics of its scores. Returns: ``folder``."""
    make_tiny_model(folder, architecture, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
        # So large that scores differ by far more than rounding.
        torch.nn.init.normal_(model.score.weight)
    model.config.mean, model.config.std = MEAN, STD
    model.save_pretrained(folder)
    return folder


def load(folder: Path, *, max_len: int = 64, config: ServeRMConfig | None = None, **options: Any) -> RewardModel:
    """Loads a reward model on the CPU in float32."""
    ds = dataclasses.replace((config or ServeRMConfig()).ds, param_dtype="fp32", **options.pop("ds", {}))
    return RewardModel.load(folder, ds=ds, device="cpu", max_len=max_len, **options)


def plain_scores(folder: Path, texts: Sequence[str], tokenizer: Any) -> list[float]:
    """What transformers alone says of each text."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        rows = [tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"] for text in texts]
        return [model(row).logits.item() for row in rows]


class Client:
    """Asks one server."""

    def __init__(self, server: RewardServer, url: str, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.url = url
        self.session = session

    async def post(self, body: Any, **options: Any) -> tuple[int, Any]:
        """Returns: status and JSON of an answer; ``body`` is sent as JSON, or as it is where it is bytes."""
        sent = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.session.post(f"{self.url}/get_reward", **sent, **options) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, str]:
        """Returns: status and text."""
        async with self.session.get(f"{self.url}{path}") as response:
            return response.status, await response.text()

    async def until_ready(self) -> None:
        """Waits until the model is loaded."""
        while (await self.get("/health"))[0] != 200:
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serving(load: Callable[[], Any], **flags: Any) -> AsyncIterator[Client]:
    """A server on a free port; at the end it is told to stop, as by SIGTERM.

    Args:
        load: gives what scores.
        flags: of ``serve_rm``.
    """
    listener = listen("127.0.0.1", 0)
    server = make_server(ServeRMConfig(**flags), load, ready_line="ready")
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        running = asyncio.ensure_future(serve(server, listener))
        try:
            yield Client(server, url, session)
        finally:
            if not server.signals:
                server.handle_exit(signal.SIGTERM, None)
            await asyncio.wait([running])
        running.result()


class Held:
    """A model whose forwards wait at a door."""

    def __init__(self, model: RewardModel) -> None:
        self._model = model
        self.door = threading.Event()
        self.began = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        self.began.set()
        assert self.door.wait(30)
        return self._model.score(rows)


def ask(load: Callable[[], Any], talk: Callable[[Client], Coroutine[Any, Any, Any]], **flags: Any) -> Any:
    """Returns: what ``talk`` with a server that is ready returned."""

    async def main() -> Any:
        async with serving(load, **flags) as client:
            await client.until_ready()
            return await talk(client)

    return asyncio.run(main())
