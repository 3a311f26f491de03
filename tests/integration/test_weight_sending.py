"""The sender of weights and engines that fail it: the run learns which engine it was, and why."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from openrlhf.rollout.integrity import TransferError
from openrlhf.rollout.sending import send_weights
from openrlhf.rollout.transports import BroadcastSender, Inbox, Look, Offer, Rendezvous, WeightGroup
from openrlhf.utils.errors import RunError
from tests.ports import open_store

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20)
    yield
    ray.shutdown()


class Engine:
    """Takes buckets as an engine's worker does, or fails before it has."""

    def __init__(self, fault: str | None) -> None:
        self._fault = fault
        self._inbox = Inbox(torch.device("cpu"))
        self._taken: dict[str, int] = {}

    def join(self, place: Rendezvous, rank: int) -> None:
        self._inbox.join(place, rank)

    def begin_update(self) -> None:
        self._taken = {}

    def load_bucket(self, payload: dict[str, Any], checksums: dict[str, int]) -> None:
        if self._fault == "raises":
            raise MemoryError("no room for a bucket")
        if self._fault == "hangs":
            threading.Event().wait()
        self._taken |= self._inbox.take(payload)[1]
        if self._fault == "hangs afterwards":
            threading.Event().wait()
        if self._fault == "raises afterwards":
            raise MemoryError("no room for a layer")

    def end_update(self, manifest: dict[str, int], version: int) -> None:
        assert self._taken == manifest


def broadcast_to(*faults: str | None, timeout: float) -> int:
    """Sends a model to engines with these faults over gloo, whose own patience is far longer than ``timeout``."""
    remote = ray.remote(num_cpus=0)(Engine)
    engines: dict[str, Any] = {f"rollout engine {n}": remote.remote(fault) for n, fault in enumerate(faults)}
    store = open_store()
    place = Rendezvous("127.0.0.1", store.port, "gloo", 1 + len(engines), 150.0)
    joins = [engine.join.remote(place, rank) for rank, engine in enumerate(engines.values(), 1)]
    sender = BroadcastSender(WeightGroup(place, 0, torch.device("cpu")))
    ray.get(joins, timeout=60)
    weights = [(f"w{n}", torch.full((3, 5), float(n))) for n in range(4)]
    try:
        return send_weights(weights, sender, engines, torch.float32, 1, leads=True, timeout=timeout)
    finally:
        for engine in engines.values():
            ray.kill(engine)


def test_engines_that_take_a_broadcast_hold_the_whole_model() -> None:
    assert broadcast_to(None, None, timeout=60.0) == 4 * 15 * 4


def test_an_engine_that_fails_before_a_broadcast_is_named_with_its_reason() -> None:
    with pytest.raises(RunError, match="rollout engine 1 did not take the weights: MemoryError: no room for a bucket"):
        broadcast_to(None, "raises", timeout=100.0)


def test_an_engine_that_fails_while_another_is_waited_for_is_named_at_once() -> None:
    with pytest.raises(RunError, match="rollout engine 1 did not take the weights: MemoryError: no room for a layer"):
        broadcast_to("hangs afterwards", "raises afterwards", timeout=100.0)


def test_an_engine_that_never_takes_part_in_a_broadcast_is_named_when_the_time_is_up() -> None:
    with pytest.raises(RunError, match="rollout engine 0 did not take the weights within 2 s"):
        broadcast_to("hangs", timeout=2.0)


class Keyed:
    """A sender that tells each engine something of its own."""

    every_rank = True
    bucket_bytes = 16

    def put(self, tensors: dict[str, torch.Tensor]) -> Offer:
        """Numbers the engines."""
        own = {f"rollout engine {n}": {"key": n} for n in range(2)}
        return Offer({"names": sorted(tensors)}, dict.fromkeys(tensors, 0), 4, own)

    def deliver(self, look: Look) -> None:
        """Nothing to do."""

    def release(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is open."""


class Listener:
    """An engine that keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def begin_update(self) -> None:
        """Nothing to do."""

    def load_bucket(self, payload: dict[str, Any], checksums: dict[str, int]) -> None:
        self.told.append(payload)

    def end_update(self, manifest: dict[str, int], version: int) -> None:
        """Nothing to do."""

    def heard(self) -> list[dict[str, Any]]:
        return self.told


def test_every_engine_is_told_what_is_for_it_alone() -> None:
    remote = ray.remote(num_cpus=0)(Listener)
    engines = {f"rollout engine {n}": remote.remote() for n in range(2)}
    weights = [(f"w{n}", torch.ones(4)) for n in range(2)]
    send_weights(weights, Keyed(), engines, torch.float32, 1, leads=True, timeout=60.0)
    for n, engine in enumerate(engines.values()):
        assert ray.get(engine.heard.remote(), timeout=60) == [{"names": [f"w{k}"], "key": n} for k in range(2)]
        ray.kill(engine)


def test_an_engine_that_the_sender_does_not_know_is_told_nothing() -> None:
    with pytest.raises(TransferError, match="nothing for rollout engine 2, only for .*rollout engine 0"):
        Keyed().put({"w": torch.ones(4)}).payload_for("rollout engine 2")
