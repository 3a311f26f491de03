"""What ``/metrics`` tells, in the text format of Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = tuple(2**power for power in range(6, 18))


class ServerMetrics:
    """The metrics of one server, in a registry of their own."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        common = {"namespace": "openrlhf", "subsystem": "reward", "registry": self._registry}
        self._requests = Counter("requests", "Requests answered, by HTTP status.", ["status"], **common)
        self._seconds = Histogram(
            "request_seconds", "From a request's first byte to its answer.", buckets=_SECONDS, **common
        )
        self._texts = Counter("texts", "Texts scored.", **common)
        self._tokens = Counter("tokens", "Tokens scored.", **common)
        self.waiting = Gauge("waiting_texts", "Texts accepted and not yet answered.", **common)
        self.ready = Gauge("ready", "1 while the model is loaded and scores, else 0.", **common)
        self._batch_texts = Histogram("batch_texts", "Texts of a forward.", buckets=_TEXTS, **common)
        self._batch_tokens = Histogram("batch_tokens", "Tokens of a forward.", buckets=_TOKENS, **common)
        self._forward = Histogram("forward_seconds", "Seconds of a forward.", buckets=_SECONDS, **common)
        self._failures = Counter("failed_forwards", "Forwards that raised.", **common)

    def answered(self, status: int, seconds: float) -> None:
        """Counts a request."""
        self._requests.labels(str(status)).inc()
        self._seconds.observe(seconds)

    @contextmanager
    def forward(self, texts: int, tokens: int) -> Iterator[None]:
        """Measures a forward; one that raises counts as failed."""
        started = time.perf_counter()
        with self._failures.count_exceptions():
            yield
        self._forward.observe(time.perf_counter() - started)
        self._batch_texts.observe(texts)
        self._batch_tokens.observe(tokens)
        self._texts.inc(texts)
        self._tokens.inc(tokens)

    def text(self) -> bytes:
        """Returns: all of it as Prometheus reads it."""
        return generate_latest(self._registry)
