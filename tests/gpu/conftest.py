"""Deals the cards of a machine out to the workers of pytest-xdist, and keeps tests that measure a card apart."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest
import torch

# Longer than the engine tests of a machine take together.
WAIT_S = 1800


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deal-cards", action="store_true", help="each worker of pytest-xdist sees one GPU alone")


def visible_cards() -> list[str]:
    """Returns: the names of the GPUs that this process sees."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(card) for card in range(torch.cuda.device_count())]


def pytest_configure(config: pytest.Config) -> None:
    """Has a worker see one card, dealt out in turn."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    cards = visible_cards()
    if config.getoption("--deal-cards", default=False) and worker.startswith("gw") and cards:
        os.environ["CUDA_VISIBLE_DEVICES"] = cards[int(worker[2:]) % len(cards)]


def open_lock(name: str) -> IO[str]:
    """Opens a file for locks of this user's tests on this machine."""
    return (Path(tempfile.gettempdir()) / f"openrlhf-tests-{os.getuid()}-{name.replace('/', '-')}").open("a+")


def take(card: str, file: IO[str], kind: int) -> None:
    """Locks a file of a card; fails, naming the test that took it last, where it is not free in time."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.seek(0)
                pytest.fail(f"GPU {card} was not free within {WAIT_S} s; taken last by {file.read()}")
            time.sleep(0.1)


@pytest.fixture(autouse=True)
def held_cards(request: pytest.FixtureRequest) -> Iterator[None]:
    """Holds the cards that a test sees: alone where it starts an engine, which measures what is free as it starts.

    The test's own time-out begins afterwards (func_only). Cards are told apart by the names that are visible: a run
    that calls them otherwise, or has another TMPDIR, does not wait for this one.
    """
    kind = fcntl.LOCK_EX if request.node.get_closest_marker("engine") else fcntl.LOCK_SH
    with ExitStack() as held:
        # Always in the same order, so that two tests never wait for each other.
        for card in sorted(set(visible_cards())):
            file = held.enter_context(open_lock(f"card-{card}"))
            # One by one, or tests that share a card would go on before one that waits until it is free.
            with open_lock(f"turn-{card}") as turn:
                take(card, turn, fcntl.LOCK_EX)
                take(card, file, kind)
            file.truncate(0)
            file.write(request.node.nodeid)
            file.flush()
        yield
