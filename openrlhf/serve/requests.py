"""What a request may say, and how it is refused."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# How much of a refused body is still read, in multiples of its limit: a client that is cut off while it sends sees a
# broken connection in place of the answer.
READ_OUT = 8


class Refusal(Exception):
    """A request that gets no rewards.

    Attributes:
        status: of HTTP.
        headers: of the answer.
    """

    def __init__(self, status: int, sentence: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.headers = headers or {}


@dataclass
class Gate:
    """Lets requests in while there is room, and none once it is closing. Used by one event loop alone.

    Attributes:
        max_texts: texts that may be accepted and not yet answered.
        max_bytes: of bodies that may be read, parsed or tokenised at one time.
        texts: how many texts are accepted and not answered.
        bytes: how many bytes are held or promised.
        requests: requests that have begun and are not answered.
        closing: set once the server is about to end.
    """

    max_texts: int
    max_bytes: int
    texts: int = 0
    bytes: int = 0
    requests: int = 0
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    def enter(self, texts: int) -> None:
        """Accepts the texts of a request. Raises: Refusal."""
        if texts > self.max_texts:
            raise Refusal(413, f"{texts} texts are more than the {self.max_texts} of --max_waiting_texts; send fewer")
        self.check_open()
        if self.texts + texts > self.max_texts:
            raise Refusal(
                503,
                f"{self.texts} texts wait already, and --max_waiting_texts is {self.max_texts}; try again",
                {"Retry-After": "1"},
            )
        self.texts += texts

    def leave(self, texts: int) -> None:
        """The request is answered."""
        self.texts -= texts

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Keeps room for a body of ``size`` bytes, from before it is read until its token ids are made.

        Raises: Refusal, where there is none.
        """
        if self.bytes + size > self.max_bytes:
            raise Refusal(
                503,
                f"{self.bytes} bytes of other bodies are being read, and the server holds {self.max_bytes} at most; "
                "try again",
                {"Retry-After": "1"},
            )
        self.bytes += size
        try:
            yield
        finally:
            self.bytes -= size

    def check_open(self) -> None:
        """Raises: Refusal."""
        if self.closing.is_set():
            raise Refusal(503, "the server is stopping", {"Retry-After": "5", "Connection": "close"})


def check_key(given: str | None, key: str | None) -> None:
    """Compares an ``Authorization`` header with the server's key, in a time that tells nothing of it.

    Raises: Refusal.
    """
    if key is None:
        return
    kind, _, secret = (given or "").partition(" ")
    right = hmac.compare_digest(secret.strip().encode(), key.encode())
    if kind.lower() == "bearer" and right:
        return
    found = "no key was sent" if given is None else "the key is another"
    raise Refusal(401, f"{found}; send the header 'Authorization: Bearer KEY'", {"WWW-Authenticate": "Bearer"})


def read_queries(body: bytes) -> list[str]:
    """The texts of a request: prompt and response of each sample, in ``query``.

    ``prompts`` and ``labels``, which a reward model has no use for, are only compared in number.

    Raises: Refusal.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is no JSON: {error}") from error
    if not isinstance(request, dict) or "query" not in request:
        raise Refusal(422, 'the body must be an object with "query", a list of texts')
    queries = request["query"]
    if not isinstance(queries, list) or not queries:
        raise Refusal(422, f'"query" must be a list of one text or more, found {kind_of(queries)}')
    for number, query in enumerate(queries):
        if not isinstance(query, str):
            raise Refusal(422, f"query[{number}] must be text, found {kind_of(query)}")
    for name in ("prompts", "labels"):
        column = request.get(name)
        if column is not None and not (isinstance(column, list) and len(column) == len(queries)):
            raise Refusal(422, f'"{name}" must be a list as long as "query" ({len(queries)}), found {kind_of(column)}')
    return queries


def kind_of(value: Any) -> str:
    """Returns: what a JSON value is, in words."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    names = {type(None): "null", dict: "an object", bool: "true or false", str: "text"}
    return names.get(type(value), "a number")


def answer(rewards: Sequence[float], raw: Sequence[float] | None) -> dict[str, Any]:
    """The form that reward clients read.

    Args:
        raw: scores before normalisation; None where there was none.
    """
    logs = {} if raw is None else {"raw_score": list(raw)}
    return {"rewards": list(rewards), "scores": list(rewards), "extra_logs": logs}
