"""How sender and engines meet, and what a run says of the way that the weights take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf.trainer.weight_sync import Site, Transport, WeightSync

FIRST, SECOND = Site("node 1", "GPU-1"), Site("node 1", "GPU-2")
CPU = Site("node 1", None)


def remote(name: str, log: dict[str, tuple[Any, ...]]) -> Any:
    """A method of a Ray actor: it writes down its arguments, and answers by its name."""

    def call(*args: Any) -> str:
        log[name] = args
        return f"answer of {name}"

    return SimpleNamespace(remote=call)


def sync_of(transport: Transport, device: str = "cuda") -> tuple[WeightSync, dict[str, Any], list[dict[str, Any]]]:
    """Returns: the sync, what each end was asked for, and the waits for answers."""
    asked: dict[str, Any] = {}
    waits: list[dict[str, Any]] = []
    names = [f"actor worker {rank}" for rank in range(2)]
    actor: Any = SimpleNamespace(
        names=names,
        workers=[SimpleNamespace(open_sender=remote(name, asked)) for name in names],
        device=device,
        call_first=lambda method, *, timeout: ("10.0.0.1", 4242),
        supervisor=SimpleNamespace(get_all=lambda calls, *, what, timeout: waits.append(calls)),
    )
    engines = ["rollout engine 0", "rollout engine 1"]
    pool: Any = SimpleNamespace(names=engines, engines=[SimpleNamespace(join=remote(n, asked)) for n in engines])
    return WeightSync(actor, pool, dtype=torch.bfloat16, timeout=100.0, transport=transport), asked, waits


@pytest.mark.parametrize("transport", ["nccl", "gloo"])
def test_both_ends_of_a_broadcast_are_waited_for_together(transport: Transport) -> None:
    sync, asked, waits = sync_of(transport)
    sync.connect({"rollout engine 0": [CPU, CPU], "rollout engine 1": [CPU]})
    assert waits == [{name: f"answer of {name}" for name in asked}] and len(asked) == 4
    place = asked["rollout engine 0"][0]
    assert (place.address, place.port, place.backend, place.world_size) == ("10.0.0.1", 4242, transport, 4)
    assert [asked[f"rollout engine {n}"] for n in range(2)] == [(place, 1), (place, 3)]
    assert [asked[f"actor worker {rank}"] for rank in range(2)] == [(transport, place, {})] * 2


@pytest.mark.parametrize("transport", ["shm", "ipc"])
def test_nobody_has_to_meet_for_the_other_ways(transport: Transport) -> None:
    sync, asked, _ = sync_of(transport)
    sync.connect({"rollout engine 0": [FIRST, SECOND], "rollout engine 1": [SECOND]})
    readers = {"GPU-1": ["rollout engine 0"], "GPU-2": ["rollout engine 0", "rollout engine 1"]}
    assert asked == {f"actor worker {rank}": (transport, None, readers) for rank in range(2)}


@pytest.mark.parametrize(
    ("wanted", "transport", "device", "said"),
    [
        ("nccl", "shm", "cpu", False),
        ("nccl", "shm", "cuda", True),
        ("nccl", "ipc", "cuda", True),
        ("nccl", "nccl", "cuda", False),
        ("auto", "gloo", "cuda", False),
        ("ipc", "shm", "cpu", True),
    ],
)
def test_a_way_other_than_the_one_that_was_asked_for_is_told(
    wanted: str, transport: Transport, device: str, said: bool
) -> None:
    note = sync_of(transport, device)[0].note(wanted)
    assert (note is not None) == said and (not said or f"--vllm.sync_backend {wanted} becomes {transport}" in note)
