"""Buckets in one buffer, the ways that they travel, and who takes which way."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.config import ConfigError
from openrlhf.rollout import transports
from openrlhf.rollout.integrity import _GPU_CHUNK, checksum, packed_checksums
from openrlhf.rollout.packing import Layout, pack, unpack
from openrlhf.rollout.transports import BroadcastSender, Inbox, Rendezvous, SharedMemorySender, WeightGroup
from openrlhf.trainer.weight_sync import Site, choose_transport
from tests.ports import open_store

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 50).to(dtype)


def same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return list(first) == list(second) and all(
        first[n].dtype == second[n].dtype and torch.equal(first[n], second[n]) for n in first
    )


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(DTYPES)), min_size=1, max_size=6
    )
)
@settings(deadline=None)
def test_what_is_packed_comes_out_again_and_its_checksums_are_those_of_the_tensors(parts: list) -> None:
    tensors = {f"w{index}": random_tensor(shape, dtype, index) for index, (shape, dtype) in enumerate(parts)}
    layout, buffer = pack(tensors)
    described = Layout(**layout.as_dict())
    assert same(unpack(described, buffer), tensors)
    sums = {name: checksum(tensor) for name, tensor in tensors.items()}
    assert packed_checksums(described, buffer, at_once=True) == sums == packed_checksums(described, buffer)


def test_strided_tensors_are_packed_as_they_read() -> None:
    tensors = {
        "turned": random_tensor((4, 6), torch.float32).t(),
        "every other": random_tensor((9, 8), torch.float32)[::2],
    }
    assert same(unpack(*pack(tensors)), tensors)


def test_tensors_across_the_pieces_that_are_hashed_at_once_keep_their_checksums() -> None:
    tensors = {name: random_tensor((size,), torch.int64, size) for name, size in
               (("a", 3), ("b", _GPU_CHUNK - 5), ("c", 7), ("d", _GPU_CHUNK + 1))}  # fmt: skip
    layout, buffer = pack(tensors)
    assert packed_checksums(layout, buffer, at_once=True) == {name: checksum(t) for name, t in tensors.items()}


@pytest.mark.parametrize("place", [0, 7, 100])
def test_a_single_changed_byte_changes_the_checksum_of_its_tensor_alone(place: int) -> None:
    layout, buffer = pack({"a": random_tensor((8,), torch.float32), "b": random_tensor((64,), torch.bfloat16)})
    before = packed_checksums(layout, buffer, at_once=True)
    buffer[place] += 1
    after = packed_checksums(layout, buffer, at_once=True)
    changed = "a" if place < 32 else "b"
    assert {name for name in before if before[name] != after[name]} == {changed}


def test_a_buffer_of_another_size_is_refused() -> None:
    layout, buffer = pack({"a": torch.ones(8)})
    with pytest.raises(ValueError, match="16 bytes for a layout of 32"):
        unpack(layout, buffer[:16])


def nobody_fails() -> None:
    """For engines that all take what they are given."""


def test_a_bucket_goes_through_shared_memory_and_leaves_nothing() -> None:
    sender = SharedMemorySender()
    tensors = {"w": random_tensor((5, 3), torch.bfloat16), "b": random_tensor((3,), torch.float32)}
    offer = sender.put(tensors)
    taken, sums = Inbox(torch.device("cpu")).take(offer.payload)
    sender.deliver(nobody_fails)
    sender.release()
    sender.close()
    assert {n: taken[n].tolist() for n in taken} == {n: tensors[n].tolist() for n in tensors}
    assert sums == offer.checksums and offer.nbytes == 5 * 3 * 2 + 3 * 4
    with pytest.raises(FileNotFoundError):
        Inbox(torch.device("cpu")).take(offer.payload)


def test_each_engine_gets_a_handle_of_its_own_on_each_of_its_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of two: the handles of the other are gathered."""
    shared: list[str] = []

    def share(buffer: torch.Tensor) -> str:
        shared.append(f"handle {len(shared)}")
        return shared[-1]

    def gather(ranks: list[Any], own: dict[str, Any]) -> None:
        ranks[:] = [own, {"first": {"GPU-2": "of rank 1"}}]

    monkeypatch.setattr(transports, "_share", share)
    monkeypatch.setattr(transports, "gpu_uuid", lambda: "GPU-1")
    monkeypatch.setattr(transports.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(transports.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(transports.dist, "all_gather_object", gather)
    readers = {"GPU-1": ["first", "second"], "GPU-2": ["first"]}
    offer = transports.IpcSender(readers).put({"w": torch.ones(3)})
    layout = offer.payload["layout"]
    assert offer.payload_for("first") == {"layout": layout, "handles": {"GPU-1": "handle 0", "GPU-2": "of rank 1"}}
    assert offer.payload_for("second") == {"layout": layout, "handles": {"GPU-1": "handle 1"}}
    # One that nobody opens would keep the memory for good.
    assert len(shared) == 2


def receive(place: Rendezvous, rank: int, offers: Any, answers: Any) -> None:
    inbox = Inbox(torch.device("cpu"))
    answers.put(f"worker {rank} is there")
    inbox.join(place, rank)
    while (payload := offers.get()) is not None:
        tensors, sums = inbox.take(payload)
        answers.put((rank, {name: tensor.float().tolist() for name, tensor in tensors.items()}, sums))


def test_one_sender_reaches_the_workers_of_several_engines_over_gloo() -> None:
    context = multiprocessing.get_context("spawn")
    store = open_store()
    place = Rendezvous("127.0.0.1", store.port, "gloo", 3, 60.0)
    answers, offers = context.Queue(), [context.Queue(), context.Queue()]
    workers = [
        context.Process(target=receive, args=(place, rank, offers[rank - 1], answers), daemon=True) for rank in (1, 2)
    ]
    for worker in workers:
        worker.start()
    # What they import may take longer on a busy machine than the meeting is given.
    assert sorted(answers.get(timeout=200) for _ in workers) == ["worker 1 is there", "worker 2 is there"]
    sender = BroadcastSender(WeightGroup(place, 0, torch.device("cpu")))
    for seed in range(3):
        tensors = {"w": random_tensor((7, 3), torch.bfloat16, seed), "b": random_tensor((5,), torch.float32, seed)}
        offer = sender.put(tensors)
        for queue in offers:
            queue.put(offer.payload)
        sender.deliver(nobody_fails)
        found = sorted(answers.get(timeout=60) for _ in workers)
        sender.release()
        values = {name: tensor.float().tolist() for name, tensor in tensors.items()}
        assert found == [(1, values, offer.checksums), (2, values, offer.checksums)]
    for queue in offers:
        queue.put(None)
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0


def test_a_sender_whom_nobody_meets_gives_up() -> None:
    start, store = time.monotonic(), open_store()
    with pytest.raises(RuntimeError):
        WeightGroup(Rendezvous("127.0.0.1", store.port, "gloo", 2, 1.0), 0, torch.device("cpu"))
    assert time.monotonic() - start < 60


def test_a_worker_that_has_met_nobody_refuses_a_broadcast() -> None:
    layout, _ = pack({"a": torch.ones(2)})
    with pytest.raises(ValueError, match="never met the sender"):
        Inbox(torch.device("cpu")).take({"layout": layout.as_dict()})


CPU = Site("node 1", None)
FIRST, SECOND = Site("node 1", "GPU-1"), Site("node 1", "GPU-2")
FAR = Site("node 2", "GPU-3")


@pytest.mark.parametrize(
    ("wanted", "sender", "engines", "expected"),
    [
        ("nccl", [CPU], [[CPU], [CPU]], "shm"),
        ("auto", [CPU], [[CPU], [replace(CPU, node="node 2")]], "gloo"),
        ("ipc", [CPU], [[CPU]], "shm"),
        ("gloo", [CPU], [[CPU]], "gloo"),
        ("nccl", [FIRST], [[FIRST]], "ipc"),
        ("nccl", [FIRST, SECOND], [[FIRST], [SECOND]], "ipc"),
        ("auto", [FIRST, SECOND], [[FIRST, SECOND]], "ipc"),
        # Each rank hands the weights to the worker on its own card, on whatever node.
        ("nccl", [FIRST, FAR], [[FIRST], [FAR]], "ipc"),
        ("ipc", [FIRST, FAR], [[FIRST], [FAR]], "ipc"),
        ("nccl", [FIRST], [[SECOND]], "nccl"),
        ("auto", [FIRST], [[SECOND], [FAR]], "nccl"),
        # The sender's card would stand twice in one NCCL group.
        ("auto", [FIRST], [[FIRST], [SECOND]], "shm"),
        ("nccl", [FIRST], [[FIRST], [FAR]], "gloo"),
        ("shm", [FIRST], [[SECOND]], "shm"),
        ("gloo", [FIRST], [[FAR]], "gloo"),
    ],
)
def test_weights_take_the_fastest_way_that_there_is(
    wanted: str, sender: list[Site], engines: list[list[Site]], expected: str
) -> None:
    workers = {f"rollout engine {index}": sites for index, sites in enumerate(engines)}
    assert choose_transport(wanted, sender, workers) == expected


@pytest.mark.parametrize(
    ("wanted", "engine", "said"),
    [("ipc", SECOND, "not every engine stands on a GPU of the actor"), ("shm", FAR, "rollout engine 0 and actor")],
)
def test_a_way_that_does_not_lead_to_an_engine_is_refused_by_its_flag(wanted: str, engine: Site, said: str) -> None:
    with pytest.raises(ConfigError, match=f"--vllm.sync_backend {wanted}: .*{said}"):
        choose_transport(wanted, [FIRST], {"rollout engine 0": [engine]})
