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
        cards, number = seen.split(","), int(worker[2:])
        if number >= len(cards):
            raise pytest.UsageError(f"pytest -n asks for more workers than the {len(cards)} GPUs that are visible")
        os.environ["CUDA_VISIBLE_DEVICES"] = cards[number]
