"""The command `serve_rm` as users start it: under many clients at once, and until it is told to stop."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from openrlhf.serve.model import RewardModel
from tests.serve_room import load

ROOT = Path(__file__).parents[2]
START_S, END_S, LOAD_S = 120, 60, 240
CLIENTS, REQUESTS = 64, 2000
WORDS = "hello world what is the answer user think about it step by one two three red green".split()


class Running:
    """A server process.

    Attributes:
        model: folder of what it serves.
        log: file of stdout and stderr.
    """

    def __init__(self, process: subprocess.Popen[bytes], url: str, model: Path, log: Path) -> None:
        self.process = process
        self.url = url
        self.model = model
        self.log = log

    def wait_for(self, text: str) -> None:
        """Waits until ``text`` was printed."""
        deadline = time.monotonic() + START_S
        while text not in self.log.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The example script's small form, on a free port; whatever of it is left at the end is killed."""
    folder = tmp_path_factory.mktemp("served")
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            ["bash", str(ROOT / "examples/scripts/serve_remote_rm.sh"), "cpu", "--port", str(port)],
            cwd=folder,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        model = folder / "outputs/tiny/reward_model"
        running = Running(process, f"http://127.0.0.1:{port}", model, folder / "log.txt")
        running.wait_for(f"http://127.0.0.1:{port}/get_reward\n")
        yield running
    finally:
        process.kill()
        process.wait(END_S)


async def in_load(url: str, work: list[list[str]]) -> tuple[list[list[float]], str]:
    """Asks for the rewards of every request, ``CLIENTS`` at once. Returns: the rewards, and the server's metrics."""
    todo = iter(enumerate(work))
    rewards: list[list[float]] = [[] for _ in work]

    async def client(session: aiohttp.ClientSession) -> None:
        for number, texts in todo:
            async with session.post(f"{url}/get_reward", json={"query": texts}) as response:
                body = await response.json()
                assert response.status == 200, body
                rewards[number] = body["rewards"]

    async with asyncio.timeout(LOAD_S), aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*[client(session) for _ in range(CLIENTS)])
        async with session.get(f"{url}/metrics") as response:
            return rewards, await response.text()


def direct_scores(model: RewardModel, texts: list[str]) -> dict[str, float]:
    """Scores of texts, each in a forward of its own."""
    return {text: model.score([model.encode(text)])[0] for text in texts}


@pytest.mark.timeout(480)
def test_two_thousand_requests_of_64_clients_are_all_answered_each_with_its_own_rewards(server: Running) -> None:
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 18))) for _ in range(300)]
    work = [rng.sample(texts, rng.choice([1, 1, 2, 5])) for _ in range(REQUESTS)]
    rewards, metrics = asyncio.run(in_load(server.url, work))
    expected = direct_scores(load(server.model, max_len=128), texts)
    assert max(expected.values()) - min(expected.values()) > 0.1
    wrong = [
        number
        for number, (asked, found) in enumerate(zip(work, rewards, strict=True))
        if found != pytest.approx([expected[text] for text in asked], abs=1e-4)
    ]
    assert wrong == []
    lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    count = sum(map(len, work))
    assert float(lines['openrlhf_reward_requests_total{status="200"}']) == REQUESTS
    assert float(lines["openrlhf_reward_texts_total"]) == count
    # Requests that wait share a forward.
    assert float(lines["openrlhf_reward_forward_seconds_count"]) < REQUESTS / 2


@pytest.mark.timeout(240)
def test_sigterm_under_load_answers_what_was_accepted_and_ends_the_process(server: Running) -> None:
    async def main() -> list[int]:
        async with asyncio.timeout(LOAD_S), aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def ask() -> int:
                texts = [" ".join(WORDS)] * 100
                async with session.post(f"{server.url}/get_reward", json={"query": texts}) as response:
                    body = await response.json()
                    assert len(body.get("rewards", [])) == (100 if response.status == 200 else 0)
                    return response.status

            asked = [asyncio.ensure_future(ask()) for _ in range(8)]
            while True:
                async with session.get(f"{server.url}/metrics") as response:
                    if "openrlhf_reward_waiting_texts 800.0" in await response.text():
                        break
            server.process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*asked)

    assert asyncio.run(main()) == [200] * 8
    assert server.process.wait(END_S) == 128 + signal.SIGTERM
    assert server.log.read_text().splitlines()[-1] == "openrlhf serve_rm: terminated"
    assert "Traceback" not in server.log.read_text()
