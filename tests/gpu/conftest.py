"""Deals the cards of a machine out to the workers of pytest-xdist, and keeps tests that measure a card apart."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deal-cards", action="store_true", help="each worker of pytest-xdist sees one GPU alone")


def visible_cards() -> list[str]:
    """Returns: the names of the GPUs that this process sees."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(card) for card in range(torch.cuda.device_count())]


def pytest_configure(config: pytest.Config) -> None:
    """Has a worker see one card alone, in turn."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    cards = visible_cards()
    if config.getoption("--deal-cards", default=False) and worker.startswith("gw") and cards:
        os.environ["CUDA_VISIBLE_DEVICES"] = cards[int(worker[2:]) % len(cards)]


@pytest.fixture(autouse=True)
def held_cards(request: pytest.FixtureRequest) -> Iterator[None]:
    """Holds the cards that a test sees: alone where it starts an engine, which measures what is free as it starts."""
    alone = request.node.get_closest_marker("engine") is not None
    with ExitStack() as held:
        # Always in the same order, so that two tests never wait for each other.
        for card in sorted(visible_cards()):
            file = Path(tempfile.gettempdir()) / f"openrlhf-tests-{os.getuid()}-card-{card}"
            fcntl.flock(held.enter_context(file.open("w")), fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
