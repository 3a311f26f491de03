"""Fixtures that several files of unit tests use."""

from __future__ import annotations

import gc
import importlib.machinery
import importlib.util
import logging
import threading
import time
from collections.abc import Iterator

import pytest

from openrlhf.agents import user_loop


@pytest.fixture
def threads_that_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails a test that leaves a thread of a user's code behind."""
    monkeypatch.setattr(user_loop, "GRACE_S", 0.2)
    before = set(threading.enumerate())
    # Records that are kept for the report hold tracebacks, and they hold executors.
    caplog.set_level(logging.CRITICAL, logger="openrlhf.agents.runner")
    yield
    deadline = time.monotonic() + 10
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        # Executors end their threads when they are collected.
        gc.collect()
        time.sleep(0.02)
    assert not left


@pytest.fixture
def bitsandbytes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """For checks of flags alone: the package itself is there for tests/extras only."""
    find = importlib.util.find_spec
    spec = importlib.machinery.ModuleSpec("bitsandbytes", None)
    monkeypatch.setattr(
        "openrlhf.config.checks_system.find_spec",
        lambda name, *rest: spec if name == "bitsandbytes" else find(name, *rest),
    )
