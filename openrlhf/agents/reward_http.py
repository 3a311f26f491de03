"""Rewards from servers: POST {"query", "prompts", "labels"} -> {"rewards", "scores", "extra_logs"}."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from openrlhf.agents.batching import Batcher, Sample
from openrlhf.agents.reward import PythonRewardSource, RewardSource
from openrlhf.agents.reward_values import Outcome, RewardFailure, RewardFormError, RewardResult, read_rewards
from openrlhf.config.errors import ConfigError
from openrlhf.config.urls import parse_urls

_FLAG = "--reward.remote_url"
# One request carries this much at most: many servers refuse bodies above 1 MiB. A longer sample goes alone.
MAX_SAMPLES = 64
MAX_CHARACTERS = 300_000
MAX_ANSWER_BYTES = 64 * 2**20
CONNECTIONS_PER_HOST = 64
# Waits between tries and rests of a failing server double from the first to the second, in seconds.
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 30.0
# At the start a server may still be loading its model.
PATIENCE_S = 60.0


class _Refused(Exception):
    """A request gave no rewards; the message says why."""


class _Busy(_Refused):
    """The server has no room now, and has said when to come again.

    Attributes:
        after: seconds.
    """

    def __init__(self, reason: str, after: float) -> None:
        super().__init__(reason)
        self.after = after


@dataclass
class _Server:
    url: str
    failures: int = 0
    rests_until: float = 0.0

    def failed(self, now: float) -> None:
        self.failures += 1
        self.rests_until = now + min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(self.failures, 10))

    def served(self) -> None:
        self.failures, self.rests_until = 0, 0.0


def make_reward_source(
    remote_url: str | Sequence[str],
    *,
    workers: int = 4,
    timeout: float = 300.0,
    max_retries: int = 2,
    key: str | None = None,
) -> RewardSource:
    """The source that ``--reward.remote_url`` names: servers, where it holds an http address, or a Python file.

    Raises: ConfigError.
    """
    given = [remote_url] if isinstance(remote_url, str) else list(remote_url)
    if any("://" in url for url in given):
        return HttpRewardSource(parse_urls(remote_url), timeout=timeout, max_retries=max_retries, key=key)
    if len(given) != 1:
        raise ConfigError(f"{_FLAG} takes one Python file, found {len(given)}")
    return PythonRewardSource(given[0], workers=workers, timeout=timeout, max_retries=max_retries)


class HttpRewardSource:
    """Rewards from servers, used in turn; one that fails rests, for longer each time.

    Samples that arrive together share a request, and are sent one by one if that fails. A server that answers 503 and
    says in Retry-After when it has room is no failing one: the next server is asked, or it again, for ``timeout``. A
    sample is given up after ``timeout`` x (1 + ``max_retries``), waits included.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout: float = 300.0,
        max_retries: int = 2,
        patience: float = PATIENCE_S,
        key: str | None = None,
    ) -> None:
        """
        Args:
            urls: see ``parse_urls``.
            timeout: seconds that one request may take.
            max_retries: further tries of a sample after a failed one.
            patience: seconds that the servers have at the start until the first one takes connections.
            key: what the servers ask for; sent as ``Authorization: Bearer KEY``.

        Raises: ConfigError, where an address is none.
        """
        self._servers = [_Server(url) for url in parse_urls(urls)]
        self._timeout = timeout
        self._max_retries = max_retries
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._patience = patience
        self._next = 0
        # Its own generator: waits must not move the random numbers of anything else.
        self._random = random.Random()
        self._batcher = Batcher(
            self._request,
            max_samples=MAX_SAMPLES,
            max_characters=MAX_CHARACTERS,
            closed=_Refused("the reward source was closed"),
        )
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Waits until a server takes connections. Raises: ConfigError, where none does."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=CONNECTIONS_PER_HOST),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        now = asyncio.get_running_loop().time
        deadline = now() + self._patience
        while True:
            reasons = await asyncio.gather(*[_unreachable(server.url) for server in self._servers])
            if None in reasons:
                return
            if now() + FIRST_WAIT_S > deadline:
                await self.close()
                raise ConfigError(f"{_FLAG}: no reward server takes connections ({'; '.join(map(str, reasons))})")
            await asyncio.sleep(FIRST_WAIT_S)

    async def score(self, query: str, prompt: str, label: Any) -> Outcome:
        """Rewards one sample; see ``RewardSource.score``."""
        longest = self._timeout * (1 + self._max_retries)
        reasons: list[str] = []
        try:
            # The waits between tries and for servers without room are in it, as the check of the flags counts.
            async with asyncio.timeout(longest):
                result = await self._tries((query, prompt, label), reasons)
        except TimeoutError:
            servers = ", ".join(server.url for server in self._servers)
            reason = reasons[-1] if reasons else f"reward server {servers} gave no reward"
            counted = "--reward.timeout x (1 + --reward.max_retries)" if self._max_retries else "--reward.timeout"
            return RewardFailure(f"{reason}; given up after {longest:g} s ({counted})")
        if result is not None:
            return result
        tries = f" (in {self._max_retries + 1} tries)" if self._max_retries else ""
        return RewardFailure(f"{reasons[-1]}{tries}")

    async def _tries(self, sample: Sample, reasons: list[str]) -> RewardResult | None:
        """Asks until there is a reward, or no try is left.

        A server without room is asked again when it has said, which is no further try, for the time of one try; from
        then on it is one that fails.

        Args:
            reasons: why there is no reward yet is added to it.
        """
        now = asyncio.get_running_loop().time
        patient_until = now() + self._timeout
        tried = 0
        while tried <= self._max_retries:
            wait = self._wait(tried + 1)
            try:
                outcome = await (self._score_alone(sample) if tried else self._batcher.score(sample))
                if isinstance(outcome, RewardResult):
                    return outcome
                reasons.append(outcome.reason)
                tried += 1
            except _Refused as error:
                reasons.append(str(error))
                if isinstance(error, _Busy) and now() + error.after <= patient_until:
                    rest = min(server.rests_until for server in self._servers) - now()
                    wait = max(0.0, rest) * self._random.uniform(1.0, 1.5)
                else:
                    tried += 1
            if tried <= self._max_retries:
                await asyncio.sleep(wait)
        return None

    async def close(self) -> None:
        """Ends requests under way, as failures, and the connections."""
        self._batcher.close()
        if self._session is not None:
            await self._session.close()

    def _wait(self, tried: int) -> float:
        return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (tried - 1)) * self._random.uniform(0.5, 1.5)

    async def _score_alone(self, sample: Sample) -> Outcome:
        return (await self._request([sample]))[0]

    def _pick(self) -> _Server:
        """The next server in turn that does not rest, or the one whose rest ends first."""
        now = asyncio.get_running_loop().time()
        order = self._servers[self._next :] + self._servers[: self._next]
        server = next((s for s in order if s.rests_until <= now), min(order, key=lambda s: s.rests_until))
        self._next = (self._servers.index(server) + 1) % len(self._servers)
        return server

    async def _request(self, samples: list[Sample]) -> list[Outcome]:
        queries, prompts, labels = (list(column) for column in zip(*samples, strict=True))
        try:
            body = json.dumps({"query": queries, "prompts": prompts, "labels": labels}).encode()
        except (TypeError, ValueError) as error:
            raise _Refused(f"a label cannot be sent as JSON: {error}") from error
        server = self._pick()
        try:
            async with asyncio.timeout(self._timeout):
                outcomes = _read(await self._post(server.url, body), len(samples))
        except _Busy as busy:
            server.rests_until = asyncio.get_running_loop().time() + max(busy.after, FIRST_WAIT_S)
            raise _Busy(f"reward server {server.url} {busy}", busy.after) from busy
        except (_Refused, TimeoutError, aiohttp.ClientError, OSError, RuntimeError, ValueError) as error:
            server.failed(asyncio.get_running_loop().time())
            raise _Refused(f"reward server {server.url} {self._describe(error)}") from error
        server.served()
        return outcomes

    async def _post(self, url: str, body: bytes) -> bytes:
        """Returns: the body of the answer. Raises: _Refused or _Busy, where its status is no success."""
        if self._session is None:
            raise _Refused("was asked before start()")
        async with self._session.post(url, data=body, headers=self._headers, allow_redirects=False) as response:
            answer = await response.content.read(MAX_ANSWER_BYTES)
            while not response.content.at_eof():
                answer += await response.content.read(MAX_ANSWER_BYTES)
                if len(answer) > MAX_ANSWER_BYTES:
                    raise _Refused(f"answered with more than {MAX_ANSWER_BYTES} bytes")
            if response.status != 200:
                reason = f"answered with status {response.status}: {_excerpt(answer)}"
                after = response.headers.get("Retry-After", "")
                if response.status == 503 and after.isdecimal():
                    raise _Busy(reason, min(float(after), LONGEST_WAIT_S))
                raise _Refused(reason)
            return answer

    def _describe(self, error: Exception) -> str:
        if isinstance(error, _Refused):
            return str(error)
        # Checked first: aiohttp's own time-outs are client errors as well.
        if isinstance(error, TimeoutError):
            return f"took longer than {self._timeout:g} s (--reward.timeout)"
        return f"cannot be asked: {type(error).__name__}: {error}"


def _read(answer: bytes, count: int) -> list[Outcome]:
    try:
        returned = json.loads(answer)
    except ValueError as error:
        raise _Refused(f"answered with no JSON: {_excerpt(answer)}") from error
    try:
        if not isinstance(returned, dict):
            raise RewardFormError(f"a JSON object with 'rewards' is expected, found {_excerpt(answer)}")
        return read_rewards(returned, count)
    except RewardFormError as error:
        raise _Refused(f"answered with something unusable: {error}") from error


def _excerpt(answer: bytes) -> str:
    text = " ".join(answer[:400].decode(errors="replace").split())
    return repr(text[:120]) if text else "nothing"


async def _unreachable(url: str) -> str | None:
    """Returns: why no connection can be made, or None."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(5.0):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except (OSError, TimeoutError) as error:
        return f"{url}: {str(error) or 'no answer'}"
    writer.close()
    return None
