"""Weights from a trainer to an engine through shared memory: buckets on one side, proof of completeness on the other.

A transfer that loses a tensor, or hands over an old one, does not show in the samples at once. So each tensor travels
with a checksum, and the receiver accepts an update only when it holds exactly what the sender's manifest names.
"""

from __future__ import annotations

import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from openrlhf.utils.private_folders import SHARED_MEMORY, WEIGHTS_PREFIX, PrivateFolder, sweep

BUCKET_BYTES = 256 * 2**20
"""Bytes that a bucket holds at most, a larger single tensor apart. Small enough for a container's shared memory."""

_MARGIN_BYTES = 64 * 2**20
# Words hashed at once: what stays in a core's cache, or what keeps a GPU busy.
_CPU_CHUNK, _GPU_CHUNK = 1 << 16, 1 << 22
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
# Any odd numbers with bits all over serve.
_MIX = (-0x61C8864680B583EB, 0x632BE59BD9B4E019, -0x40A7B892E31B1A47)


class TransferError(RuntimeError):
    """A weight update that is not the sender's model, tensor for tensor."""


def checksum(tensor: torch.Tensor) -> int:
    """A hash of the tensor's bytes, their places, its dtype and its shape.

    It is no plain weighted sum: such a sum misses changes that go through a whole tensor, a doubled one among them.

    Args:
        tensor: any shape and dtype, on any device.

    Returns:
        An int below 2**64 that is the same on every device for the same bytes, dtype and shape.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    width = next(size for size in _WORDS if flat.numel() % size == 0)
    if flat.storage_offset() % width:
        flat = flat.clone()
    words = flat.view(_WORDS[width])
    chunk = _CPU_CHUNK if words.device.type == "cpu" else _GPU_CHUNK
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), chunk):
        part = words[start : start + chunk].to(torch.int64) * _MIX[0]
        part += torch.arange(start, start + part.numel(), device=part.device) * _MIX[1]
        part ^= part >> 32
        part *= _MIX[2]
        part ^= part >> 29
        total += part.sum()
    return (int(total) + zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())) % 2**64


@dataclass
class Bucket:
    """One file of tensors, and what must be found in it.

    Attributes:
        path: safetensors file in shared memory.
        checksums: per HF name.
        nbytes: of all its tensors.
    """

    path: str
    checksums: dict[str, int]
    nbytes: int


def buckets(
    parameters: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, max_bytes: int = BUCKET_BYTES
) -> Iterator[dict[str, torch.Tensor]]:
    """Groups a stream of named tensors so that only one group at a time is held.

    Args:
        parameters: HF names with whole tensors.
        dtype: what floating-point tensors are cast to: the engine's.
        max_bytes: of one group; a larger tensor stands alone.
    """
    group: dict[str, torch.Tensor] = {}
    size = 0
    for name, parameter in parameters:
        # A copy, since a gathered tensor is good only until the next one is asked for.
        tensor = parameter.detach().to(dtype if parameter.is_floating_point() else parameter.dtype, copy=True)
        nbytes = tensor.numel() * tensor.element_size()
        if group and size + nbytes > max_bytes:
            yield group
            group, size = {}, 0
        if name in group:
            raise TransferError(f"the trainer offered {name} twice in one update")
        group[name] = tensor
        size += nbytes
    if group:
        yield group


def write_bucket(folder: Path, index: int, tensors: dict[str, torch.Tensor]) -> Bucket:
    """Writes one bucket; the checksums are taken from the trainer's tensors, not from the file."""
    from safetensors.torch import save_file

    path = folder / f"bucket-{index}.safetensors"
    sums = {name: checksum(tensor) for name, tensor in tensors.items()}
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path)
    return Bucket(str(path), sums, sum(t.numel() * t.element_size() for t in tensors.values()))


@dataclass
class Receipt:
    """What one engine worker received in one update, checked as it arrives.

    Attributes:
        sums: checksum of each tensor received so far, by HF name.
    """

    sums: dict[str, int] = field(default_factory=dict)

    def accept(self, tensors: dict[str, torch.Tensor], expected: dict[str, int]) -> None:
        """Takes one bucket in.

        Raises:
            TransferError: a tensor is missing from the bucket, not expected in it, came before, or has other bytes.
        """
        missing = sorted(expected.keys() - tensors.keys())
        surplus = sorted(tensors.keys() - expected.keys())
        if missing or surplus:
            raise TransferError(f"weight bucket: missing {missing or 'none'}, not announced {surplus or 'none'}")
        for name, tensor in tensors.items():
            if name in self.sums:
                raise TransferError(f"weight {name} was received twice in one update")
            found = checksum(tensor)
            if found != expected[name]:
                raise TransferError(
                    f"weight {name} arrived with checksum {found:x}, the trainer sent {expected[name]:x}: "
                    "its bytes are stale or damaged"
                )
            self.sums[name] = found

    def complete(self, manifest: dict[str, int]) -> None:
        """Compares all that came with all that the trainer holds.

        Raises:
            TransferError: naming the tensors that differ.
        """
        missing = sorted(manifest.keys() - self.sums.keys())
        surplus = sorted(self.sums.keys() - manifest.keys())
        stale = sorted(name for name in manifest.keys() & self.sums.keys() if manifest[name] != self.sums[name])
        if missing or surplus or stale:
            raise TransferError(
                f"incomplete weight update: never received {missing[:5] or 'none'}, unknown to the trainer "
                f"{surplus[:5] or 'none'}, stale {stale[:5] or 'none'}"
            )


class Exchange:
    """Private folders for buckets: in shared memory where a bucket has room there, on disk otherwise.

    Folders that runs left behind when they were killed are removed.
    """

    def __init__(self) -> None:
        self._disk = Path(tempfile.gettempdir())
        self._folders: dict[Path, PrivateFolder] = {}
        # What a dead run left behind may be what fills the shared memory.
        sweep(WEIGHTS_PREFIX, (SHARED_MEMORY, self._disk))

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def folder(self, nbytes: int) -> Path:
        """Returns: a folder whose file system has room for ``nbytes``, if any has."""
        enough = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free >= nbytes + _MARGIN_BYTES
        root = SHARED_MEMORY if enough else self._disk
        if root not in self._folders:
            self._folders[root] = PrivateFolder(WEIGHTS_PREFIX, root)
        return self._folders[root].path

    def close(self) -> None:
        """Removes the folders."""
        for folder in self._folders.values():
            folder.close()
