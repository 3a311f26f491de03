"""The HTTP side: /get_reward, /health and /metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from openrlhf.serve.metrics import ServerMetrics
from openrlhf.serve.model import RewardModel, TextError
from openrlhf.serve.requests import READ_OUT, Gate, Refusal, answer, check_key, read_queries
from openrlhf.serve.worker import ScoringError, ScoringWorker, Stopped

logger = logging.getLogger(__name__)

# Seconds that a client may take for sending its body.
BODY_TIMEOUT_S = 60.0
# What is left of that once the server is stopping.
LAST_BODY_S = 1.0
# What proxies log for a client that has hung up; nobody reads the answer.
CLIENT_LEFT = 499


@dataclass(frozen=True)
class Limits:
    """What requests may be.

    Attributes:
        body_bytes: of a request's body.
        key: what clients have to know; None lets everyone in.
    """

    body_bytes: int
    key: str | None = None


class RewardApp:
    """Answers requests for rewards by a worker's model."""

    def __init__(self, worker: ScoringWorker[RewardModel], gate: Gate, metrics: ServerMetrics, limits: Limits) -> None:
        self._worker = worker
        self._gate = gate
        self._metrics = metrics
        self._limits = limits
        # Beside the event loop, which long texts would hold up. One thread each: a tokenizer is not made for several,
        # and JSON can take many times its bytes while it is parsed.
        self._parser = ThreadPoolExecutor(1, thread_name_prefix="parse")
        self._tokeniser = ThreadPoolExecutor(1, thread_name_prefix="tokenise")
        # No pages of its own: they would load their parts from the internet.
        self.asgi = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        self.asgi.add_api_route("/get_reward", self.get_reward, methods=["POST"], response_model=None)
        self.asgi.add_api_route("/health", self.health, methods=["GET", "HEAD"], response_model=None)
        self.asgi.add_api_route("/metrics", self.show_metrics, methods=["GET"], response_model=None)

    async def health(self) -> Response:
        """200 while the model is loaded and scores."""
        if self._gate.closing.is_set() or self._worker.ended.done():
            return _json(503, {"status": "stopping"})
        if not self._worker.ready:
            return _json(503, {"status": "loading"})
        return _json(200, {"status": "ok"})

    async def show_metrics(self) -> Response:
        """The metrics in Prometheus' text format."""
        self._metrics.ready.set(self._worker.ready and not self._gate.closing.is_set())
        self._metrics.waiting.set(self._gate.texts)
        return Response(self._metrics.text(), headers={"Content-Type": self._metrics.content_type})

    async def get_reward(self, request: Request) -> Response:
        """Rewards of the texts of a request, or one sentence that says why there are none."""
        started = time.perf_counter()
        self._gate.requests += 1
        try:
            response = await self._respond(request)
        finally:
            self._gate.requests -= 1
        self._metrics.answered(response.status_code, time.perf_counter() - started)
        return response

    async def _respond(self, request: Request) -> Response:
        try:
            return _json(200, await self._rewards(request))
        except Refusal as refusal:
            return _json(refusal.status, {"detail": str(refusal)}, refusal.headers)
        except ScoringError as error:
            return _json(500, {"detail": str(error)})
        except Stopped as error:
            return _json(503, {"detail": str(error)}, {"Retry-After": "5", "Connection": "close"})
        except ClientDisconnect:
            return Response(status_code=CLIENT_LEFT)
        except Exception:
            logger.exception("a request failed")
            return _json(500, {"detail": "the server failed; its log says how"})

    async def _rewards(self, request: Request) -> dict[str, Any]:
        with ExitStack() as accepted:
            rows = await self._rows(request, accepted)
            scores = await self._score(request, rows)
        model = self._worker.loaded.result()
        if model.std == 1.0 and model.mean == 0.0:
            return answer(scores, None)
        return answer([model.normalized(score) for score in scores], scores)

    async def _rows(self, request: Request, accepted: ExitStack) -> list[list[int]]:
        """Token ids of the texts of a request.

        Args:
            accepted: on leaving it the texts count as answered.

        Raises: Refusal, Stopped; a body that is refused unseen is read and thrown away, so that its client gets there.
        """
        with ExitStack() as held:
            try:
                check_key(request.headers.get("authorization"), self._limits.key)
                self._check_ready()
                held.enter_context(self._gate.holding(self._body_bytes(request)))
            except (Refusal, Stopped):
                await self._read(request, 0)
                raise
            run = asyncio.get_running_loop().run_in_executor
            body = await self._read(request, self._limits.body_bytes)
            queries = await run(self._parser, read_queries, body)
            self._gate.enter(len(queries))
            accepted.callback(self._gate.leave, len(queries))
            return await run(self._tokeniser, encode_all, self._worker.loaded.result(), queries)

    def _body_bytes(self, request: Request) -> int:
        """Returns: bytes that a body has; of one that comes in chunks, the most that it may have.

        Raises: Refusal, where they are too many.
        """
        limit, given = self._limits.body_bytes, request.headers.get("content-length")
        size = limit if given is None else int(given)
        if size > limit:
            raise too_large(limit)
        return size

    async def _read(self, request: Request, limit: int) -> bytes:
        """Reads a body of ``limit`` bytes at most. Raises: Refusal, where it is too large or comes too slowly."""
        reading = asyncio.ensure_future(_collect(request, limit, READ_OUT * self._limits.body_bytes))
        closing = asyncio.ensure_future(self._gate.closing.wait())
        try:
            await asyncio.wait((reading, closing), timeout=BODY_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if closing.done():
                await asyncio.wait((reading,), timeout=LAST_BODY_S)
            if reading.done():
                return reading.result()
        finally:
            reading.cancel()
            closing.cancel()
        self._gate.check_open()
        raise Refusal(408, f"the body did not come within {BODY_TIMEOUT_S:g} s", {"Connection": "close"})

    def _check_ready(self) -> None:
        self._gate.check_open()
        if self._worker.ended.done():
            raise Stopped("the model has stopped")
        if not self._worker.ready:
            raise Refusal(503, "the model is being loaded", {"Retry-After": "5"})

    async def _score(self, request: Request, rows: Sequence[Sequence[int]]) -> list[float]:
        """Raises: ClientDisconnect where nobody waits for the answer any more; what waits of it is taken back."""
        scores = asyncio.wrap_future(self._worker.submit(rows))
        left = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait((scores, left), return_when=asyncio.FIRST_COMPLETED)
            if not scores.done():
                raise ClientDisconnect
            return scores.result()
        finally:
            left.cancel()
            scores.cancel()


def too_large(limit: int) -> Refusal:
    """Returns: what a body of more than ``limit`` bytes is answered with."""
    sentence = f"the body has more than the {limit} bytes of --max_body_mb; send fewer texts at once"
    return Refusal(413, sentence, {"Connection": "close"})


def encode_all(model: RewardModel, queries: Sequence[str]) -> list[list[int]]:
    """Returns: token ids of each text. Raises: Refusal, naming the text."""
    rows = []
    for number, query in enumerate(queries):
        try:
            rows.append(model.encode(query))
        except TextError as error:
            raise Refusal(422, f"query[{number}] {error}") from error
    return rows


async def _collect(request: Request, limit: int, most: int) -> bytes:
    """Reads a body.

    Args:
        limit: bytes that it may have.
        most: of a larger one so many are read before the answer.

    Raises: Refusal, where it is too large, unless ``limit`` is 0: then it is only read.
    """
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= limit:
            body += chunk
        elif size > most:
            break
    if limit and size > limit:
        raise too_large(limit)
    return bytes(body)


def _json(status: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return JSONResponse(content, status_code=status, headers=headers)
