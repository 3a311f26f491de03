"""What the reward server holds of requests before they are token ids, and whom it sends away."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any

import pytest

from openrlhf.serve import server
from openrlhf.serve.model import RewardModel
from tests.serve_room import Client, Held, ask, load, make_reward_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RewardModel:
    return load(make_reward_model(tmp_path_factory.mktemp("admission") / "rm"))


async def begin_body(client: Client, head: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends the head of a request, and nothing of its body; returns once the server keeps room for that."""
    before = client.server.gate.bytes
    reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rpartition(":")[2]))
    writer.write(f"POST /get_reward HTTP/1.1\r\nHost: here\r\nConnection: close\r\n{head}\r\n\r\n".encode())
    while client.server.gate.bytes == before:
        await asyncio.sleep(0.01)
    return reader, writer


def test_bodies_have_room_before_they_are_read_and_what_finds_none_is_told_to_come_again(model, monkeypatch) -> None:
    monkeypatch.setattr(server, "HELD_BODIES", 2)
    body = json.dumps({"query": ["a"], "prompts": ["b" * 200]}).encode()

    async def talk(client: Client) -> tuple[Any, ...]:
        gate, large = client.server.gate, {"query": ["a" * (2**20 - 100)]}
        whole, whole_writer = await begin_body(client, f"Content-Length: {len(body)}")
        chunked, chunked_writer = await begin_body(client, "Transfer-Encoding: chunked")
        assert gate.bytes == len(body) + 2**20
        async with client.session.post(f"{client.url}/get_reward", json=large) as response:
            busy = response.status, response.headers["Retry-After"], (await response.json())["detail"]
        small = await client.post({"query": ["a"]})
        whole_writer.write(body)
        chunked_writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        answers = [await whole.read(), await chunked.read()]
        whole_writer.close()
        chunked_writer.close()
        assert gate.bytes == 0
        return busy, small, answers, await client.post(large)

    busy, small, answers, later = ask(lambda: model, talk, max_body_mb=1)
    held = len(body) + 2**20
    assert busy == (
        503,
        "1",
        f"{held} bytes of other bodies are being read, and the server holds {2**21} at most; try again",
    )
    assert small[0] == 200 and all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
    assert later[0] == 422 and "more than the 64 of --data.max_len" in later[1]["detail"]


def test_a_head_without_end_is_refused_and_its_connection_closed(model) -> None:
    async def talk(client: Client) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rpartition(":")[2]))
        writer.write(b"POST /get_reward HTTP/1.1\r\nHost: here\r\nX: " + b"a" * (2 * server.HEAD_BYTES))
        # What was sent and not read resets the connection, perhaps before its answer is seen.
        with contextlib.suppress(ConnectionResetError):
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()
        return (await client.post({"query": ["a"]}))[0]

    assert ask(lambda: model, talk) == 200


def test_a_body_that_its_client_leaves_behind_keeps_no_room(model) -> None:
    async def talk(client: Client) -> None:
        _, writer = await begin_body(client, "Content-Length: 1000")
        writer.close()
        while client.server.gate.bytes:
            await asyncio.sleep(0.01)

    ask(lambda: model, talk)


def test_while_the_tokenizer_is_busy_requests_are_read_and_what_waits_for_it_keeps_its_room(model) -> None:
    class Tokenising(Held):
        def encode(self, text: str) -> list[int]:
            self.began.set()
            assert self.door.wait(30)
            return self._model.encode(text)

        def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
            return self._model.score(rows)

    busy = Tokenising(model)

    async def talk(client: Client) -> tuple[Any, ...]:
        gate, body = client.server.gate, json.dumps({"query": ["a"]}).encode()
        waiting = [asyncio.ensure_future(client.post(body)) for _ in range(3)]
        await asyncio.to_thread(busy.began.wait, 30)
        while gate.texts < 3:
            await asyncio.sleep(0.01)
        refused, held = await client.post(b"{"), gate.bytes
        busy.door.set()
        return refused[0], held == 3 * len(body), [status for status, _ in await asyncio.gather(*waiting)], gate.bytes

    assert ask(lambda: busy, talk) == (400, True, [200] * 3, 0)
