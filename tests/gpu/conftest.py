"""Deals the cards of a machine out to the workers of pytest-xdist, one each."""

from __future__ import annotations

import os

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """Has a worker see one card alone: an engine that starts measures what is free on its own."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    count = torch.cuda.device_count()
    if worker.startswith("gw") and count:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        cards = seen.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = cards[int(worker[2:]) % len(cards)]
