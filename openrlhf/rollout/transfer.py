"""A model's weights cut into buckets, and the way of a bucket through shared memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from openrlhf.rollout.integrity import TransferError, checksum
from openrlhf.utils.private_folders import SHARED_MEMORY, WEIGHTS_PREFIX, PrivateFolder, sweep

BUCKET_BYTES = 256 * 2**20
"""Bytes that a bucket holds at most, a larger single tensor apart. Small enough for a container's shared memory."""

SHARED_BUCKET_BYTES = 512 * 2**20
"""The same for buckets that engines read on the same card: each costs messages, whatever its size."""

_MARGIN_BYTES = 64 * 2**20


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

    @property
    def payload(self) -> dict[str, str]:
        """What an engine is told of where it lies."""
        return {"path": self.path}


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
