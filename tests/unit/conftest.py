"""Fixtures that several files of unit tests use."""

from __future__ import annotations

import gc
import importlib.machinery
import importlib.util
import logging
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models to put adapters on, by name; none may be changed."""
    # Here, because few files of tests need peft.
    from tests.unit.adapter_folders import make_bases

    return make_bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture(scope="session")
def query_saved(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``query`` copies."""
    from tests.unit.adapter_folders import QUERY, causal_adapter

    return causal_adapter(bases["tied"], tmp_path_factory.mktemp("saved") / "adapter", **QUERY)


@pytest.fixture
def query(query_saved: Path, tmp_path: Path) -> Path:
    """An adapter of the tied base that a test may change."""
    return shutil.copytree(query_saved, tmp_path / "adapter")
