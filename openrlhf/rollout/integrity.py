"""Proof that what an engine received is what the trainer sent, tensor for tensor.

A transfer that loses a tensor, or hands over an old one, does not show in the samples at once. So each tensor travels
with a checksum, and the receiver accepts an update only when it holds exactly what the sender's manifest names.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import torch

from openrlhf.rollout.packing import Layout, unpack

# Words hashed at once: what stays in a core's cache, or what keeps a GPU busy.
_CPU_CHUNK, _GPU_CHUNK = 1 << 16, 1 << 22
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
# Any odd numbers with bits all over serve.
_MIX = (-0x61C8864680B583EB, 0x632BE59BD9B4E019, -0x40A7B892E31B1A47)


class TransferError(RuntimeError):
    """A weight update that is not the sender's model, tensor for tensor."""


def _mixed(words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """int64 hashes of int64 ``words``, which are changed, each with its place."""
    words *= _MIX[0]
    words += places * _MIX[1]
    words ^= words >> 32
    words *= _MIX[2]
    words ^= words >> 29
    return words


def _labelled(total: int, dtype: str, shape: tuple[int, ...]) -> int:
    return (total + zlib.crc32(f"{dtype} {shape}".encode())) % 2**64


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
        part = words[start : start + chunk].to(torch.int64, copy=True)
        total += _mixed(part, torch.arange(start, start + part.numel(), device=part.device)).sum()
    return _labelled(int(total), str(tensor.dtype), tuple(tensor.shape))


def packed_checksums(layout: Layout, buffer: torch.Tensor, *, at_once: bool | None = None) -> dict[str, int]:
    """``checksum`` of every tensor in a buffer, with a few operations for all of them together.

    Args:
        buffer: uint8, as ``pack`` laid it out.
        at_once: hashes the buffer as a whole, which pays where every operation has a price; unset means on GPUs.
    """
    tensors = unpack(layout, buffer)
    sizes = dict(zip(layout.names, layout.sizes(), strict=True))
    together = [name for name in layout.names if sizes[name] % 8 == 0 and sizes[name]]
    if at_once is None:
        at_once = buffer.device.type != "cpu"
    if not at_once or not together:
        return {name: checksum(tensor) for name, tensor in tensors.items()}
    # Starts are multiples of 8, so words of the buffer are words of its tensors.
    starts = [start // 8 for start, name in zip(layout.starts, layout.names, strict=True) if name in set(together)]
    ends = [start + sizes[name] // 8 for start, name in zip(starts, together, strict=True)]
    totals = _sums_between(
        buffer.view(torch.int64), torch.tensor(starts, device=buffer.device), torch.tensor(ends, device=buffer.device)
    ).tolist()
    sums = {
        name: _labelled(total, str(tensors[name].dtype), tuple(tensors[name].shape))
        for name, total in zip(together, totals, strict=True)
    }
    return {name: sums[name] if name in sums else checksum(tensor) for name, tensor in tensors.items()}


def _sums_between(words: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """int64, for each span of ``words`` the sum of its hashes, places counted from where it starts."""
    totals = torch.zeros_like(starts)
    for first in range(0, words.numel(), _GPU_CHUNK):
        part = words[first : first + _GPU_CHUNK].clone()
        places = torch.arange(first, first + part.numel(), device=part.device)
        owner = (torch.searchsorted(starts, places, right=True) - 1).clamp(min=0)
        # Sums wrap around, and so do their differences: exact all the same.
        running = torch.nn.functional.pad(_mixed(part, places - starts[owner]).cumsum(0), (1, 0))
        totals += running[(ends - first).clamp(0, part.numel())] - running[(starts - first).clamp(0, part.numel())]
    return totals


@dataclass
class Receipt:
    """What one engine worker received in one update, checked as it arrives.

    Attributes:
        sums: checksum of each tensor received so far, by HF name.
    """

    sums: dict[str, int] = field(default_factory=dict)

    def accept(self, found: dict[str, int], expected: dict[str, int]) -> None:
        """Takes one bucket in.

        Args:
            found: checksums of what arrived.
            expected: what the trainer announced.

        Raises:
            TransferError: a tensor is missing from the bucket, not expected in it, came before, or has other bytes.
        """
        missing = sorted(expected.keys() - found.keys())
        surplus = sorted(found.keys() - expected.keys())
        if missing or surplus:
            raise TransferError(f"weight bucket: missing {missing or 'none'}, not announced {surplus or 'none'}")
        for name, total in found.items():
            if name in self.sums:
                raise TransferError(f"weight {name} was received twice in one update")
            if total != expected[name]:
                raise TransferError(
                    f"weight {name} arrived with checksum {total:x}, the trainer sent {expected[name]:x}: "
                    "its bytes are stale or damaged"
                )
            self.sums[name] = total

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
