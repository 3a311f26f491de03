"""The ways of a bucket of weights from a trainer to the workers of engines.

Three of them: a file in shared memory (one node), the trainer's own GPU memory (workers on the same card), and a
broadcast over NCCL or gloo (anywhere). Each has a sender; ``Inbox`` is the other end of all three.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from openrlhf.rollout.integrity import TransferError, checksum, packed_checksums
from openrlhf.rollout.packing import Layout, pack, unpack
from openrlhf.rollout.transfer import BUCKET_BYTES, SHARED_BUCKET_BYTES, Exchange, write_bucket

_SENDER_RANK = 0
# Seconds between two looks at engines that a broadcast waits for.
_LOOK_S = 0.001

Look = Callable[[], None]
"""Raises where an engine that a bucket is handed to has failed or takes too long."""


@dataclass(frozen=True)
class Offer:
    """What engines are told of a bucket.

    Attributes:
        payload: plain values, which ``Inbox.take`` understands.
        checksums: per HF name.
        nbytes: of all its tensors.
        own: what each engine alone is told, by its name; None where all are told the same.
    """

    payload: dict[str, Any]
    checksums: dict[str, int]
    nbytes: int
    own: dict[str, dict[str, Any]] | None = None

    def payload_for(self, engine: str) -> dict[str, Any]:
        """Returns: all that an engine is told. Raises: TransferError for an engine of which the sender was not told."""
        if self.own is None:
            return self.payload
        if engine not in self.own:
            raise TransferError(f"the sender has nothing for {engine}, only for {sorted(self.own)}")
        return self.payload | self.own[engine]


class Sender(Protocol):
    """One way of sending. For each bucket: ``put``, then ``deliver`` while engines wait for it, then ``release``.

    Attributes:
        every_rank: all ranks of the trainer take part, with the same buckets; otherwise only the first does.
        bucket_bytes: of one bucket at most, a larger single tensor apart.
    """

    every_rank: bool
    bucket_bytes: int

    def put(self, tensors: dict[str, torch.Tensor]) -> Offer:
        """Makes a bucket ready to be taken."""

    def deliver(self, look: Look) -> None:
        """Hands it over; engines have been told. While it waits for them it calls ``look`` again and again."""

    def release(self) -> None:
        """Lets go of it; every engine has answered."""

    def close(self) -> None:
        """Ends the transport of one update."""


class SharedMemorySender:
    """A safetensors file in shared memory, or on disk where that is full."""

    every_rank = False
    bucket_bytes = BUCKET_BYTES

    def __init__(self) -> None:
        self._exchange = Exchange()
        self._files = itertools.count()
        self._path: Path | None = None

    def put(self, tensors: dict[str, torch.Tensor]) -> Offer:
        """Writes the file."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        bucket = write_bucket(self._exchange.folder(size), next(self._files), tensors)
        self._path = Path(bucket.path)
        return Offer(bucket.payload, bucket.checksums, bucket.nbytes)

    def deliver(self, look: Look) -> None:
        """Engines read the file by themselves."""

    def release(self) -> None:
        """Removes the file."""
        self._path.unlink()

    def close(self) -> None:
        """Removes the folders."""
        self._exchange.close()


class IpcSender:
    """The memory of the card that a rank shares with an engine's worker, opened there through CUDA IPC."""

    every_rank = True
    bucket_bytes = SHARED_BUCKET_BYTES

    def __init__(self, readers: Mapping[str, Sequence[str]]) -> None:
        """
        Args:
            readers: names of the engines that have a worker on a card, by the card's name.
        """
        self._readers = readers
        self._buffer: torch.Tensor | None = None

    def put(self, tensors: dict[str, torch.Tensor]) -> Offer:
        """Packs the bucket on this rank's card and gathers the handles of all ranks; collective.

        A handle for each reader: the memory is free again when every handle has been opened and let go, once.
        """
        layout, self._buffer = pack(tensors)
        card = gpu_uuid()
        ranks: list[dict[str, Any]] = [{}] * dist.get_world_size()
        dist.all_gather_object(ranks, {name: {card: _share(self._buffer)} for name in self._readers.get(card, ())})
        own: dict[str, dict[str, Any]] = {}
        for handles in ranks:
            for name, handle in handles.items():
                own.setdefault(name, {"handles": {}})["handles"] |= handle
        sums = packed_checksums(layout, self._buffer) if dist.get_rank() == 0 else {}
        return Offer({"layout": layout.as_dict()}, sums, sum(layout.sizes()), own)

    def deliver(self, look: Look) -> None:
        """Workers copy from the card by themselves."""

    def release(self) -> None:
        """Frees the bucket; collective, since the other ranks' workers have to be done as well."""
        dist.barrier()
        self._buffer = None
        torch.cuda.ipc_collect()

    def close(self) -> None:
        """Nothing is held between buckets."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the sender and the workers of all engines meet: a store that stands already.

    Attributes:
        address, port: of the store.
        backend: "nccl" or "gloo".
        world_size: the sender, which is rank 0, and all workers.
        timeout: seconds that one broadcast may take.
    """

    address: str
    port: int
    backend: str
    world_size: int
    timeout: float


class WeightGroup:
    """A process group of its own beside whatever groups a trainer and an engine have."""

    def __init__(self, place: Rendezvous, rank: int, device: torch.device) -> None:
        """Meets the others; collective over all ``world_size`` processes."""
        timeout = timedelta(seconds=place.timeout)
        self._store = dist.TCPStore(
            place.address, place.port, place.world_size, is_master=False, timeout=timeout, wait_for_workers=False,
        )  # fmt: skip
        store = dist.PrefixStore("openrlhf-weights", self._store)
        if place.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self.device = device
            self._group = dist.ProcessGroupNCCL(store, rank, place.world_size, options)
        else:
            self.device = torch.device("cpu")
            self._group = dist.ProcessGroupGloo(store, rank, place.world_size, timeout)
        # NCCL connects at the first broadcast, and looks at nobody until it has: here all are known to come.
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))

    def broadcast(self, buffer: torch.Tensor, look: Look | None = None) -> None:
        """Fills ``buffer``, on ``device``, with the sender's; returns when it is whole.

        Args:
            look: asked while others are waited for: NCCL does not notice that one of them will never come.
        """
        options = dist.BroadcastOptions()
        options.rootRank = _SENDER_RANK
        options.rootTensor = 0
        work = self._group.broadcast([buffer], options)
        while look is not None and not work.is_completed():
            look()
            time.sleep(_LOOK_S)
        work.wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class BroadcastSender:
    """Over NCCL from card to card, or over gloo through the hosts' memory."""

    every_rank = False
    # Receivers take as much memory beside the share of their engine.
    bucket_bytes = BUCKET_BYTES

    def __init__(self, group: WeightGroup) -> None:
        self._group = group
        self._buffer: torch.Tensor | None = None

    def put(self, tensors: dict[str, torch.Tensor]) -> Offer:
        """Packs the bucket where the group works."""
        layout, buffer = pack(tensors)
        sums = packed_checksums(layout, buffer)
        self._buffer = buffer.to(self._group.device)
        return Offer({"layout": layout.as_dict()}, sums, sum(layout.sizes()))

    def deliver(self, look: Look) -> None:
        """Broadcasts it."""
        self._group.broadcast(self._buffer, look)

    def release(self) -> None:
        """Frees it."""
        self._buffer = None

    def close(self) -> None:
        """The group stands for the next update."""


class Inbox:
    """A worker's end of every transport."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: WeightGroup | None = None

    def join(self, place: Rendezvous, rank: int) -> None:
        """Meets the sender."""
        self._group = WeightGroup(place, rank, self._device)

    def take(self, payload: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """Returns: the tensors of one bucket, good for as long as they are held, and their checksums."""
        if "path" in payload:
            from safetensors.torch import load_file

            tensors = load_file(payload["path"])
            return tensors, {name: checksum(tensor) for name, tensor in tensors.items()}
        layout = Layout(**payload["layout"])
        buffer = self._buffer(layout, payload)
        return unpack(layout, buffer), packed_checksums(layout, buffer)

    def _buffer(self, layout: Layout, payload: dict[str, Any]) -> torch.Tensor:
        if "handles" in payload:
            own = gpu_uuid(self._device)
            if own not in payload["handles"]:
                raise ValueError(f"no rank of the trainer stands on this worker's GPU {own}")
            # A layer whose weights lie in two buckets keeps the first ones until it has all, and the sender's memory
            # would not be free until then.
            return _open(payload["handles"][own], self._device).clone()
        if self._group is None:
            raise ValueError("a broadcast was announced to a worker that has never met the sender")
        buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=self._group.device)
        self._group.broadcast(buffer)
        return buffer


def gpu_uuid(device: torch.device | None = None) -> str:
    """Returns: the name of a card that is the same in every process."""
    return str(torch.cuda.get_device_properties(device or torch.cuda.current_device()).uuid)


def _share(buffer: torch.Tensor) -> dict[str, Any]:
    """Plain values from which another process opens ``buffer`` (uint8, one dimension); nothing of it is pickled."""
    from torch.multiprocessing.reductions import reduce_tensor

    # The event with which the receiver waits stands for the work that was asked for before it is made.
    _, arguments = reduce_tensor(buffer)
    (_, size, _, offset, _, _, _, handle, storage_size, storage_offset, _, counter, counter_offset, event, waits) = (
        arguments
    )
    return {
        "size": list(size),
        "offset": offset,
        "handle": handle,
        "storage_size": storage_size,
        "storage_offset": storage_offset,
        "counter": counter,
        "counter_offset": counter_offset,
        "event": event,
        "waits": waits,
    }


def _open(shared: dict[str, Any], device: torch.device) -> torch.Tensor:
    """The memory that another process shares, on this process's ``device``."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    return rebuild_cuda_tensor(
        torch.Tensor,
        torch.Size(shared["size"]),
        (1,),
        shared["offset"],
        torch.storage.TypedStorage,
        torch.uint8,
        device.index,
        shared["handle"],
        shared["storage_size"],
        shared["storage_offset"],
        False,
        shared["counter"],
        shared["counter_offset"],
        shared["event"],
        shared["waits"],
    )
