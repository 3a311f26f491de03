"""Several tensors in one buffer: what travels to an engine as one piece, and a description of plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import torch

# Every tensor begins at a multiple of this many bytes, so that it can be viewed in any dtype where it stands.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a buffer stand; one entry a tensor in each list.

    Attributes:
        names: HF names.
        dtypes: as torch calls them, without "torch.".
        starts: in bytes.
        nbytes: of the whole buffer.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    starts: list[int]
    nbytes: int

    def as_dict(self) -> dict[str, Any]:
        """Returns: the fields as plain values, which every serializer takes."""
        return asdict(self)

    def sizes(self) -> list[int]:
        """Returns: bytes of each tensor."""
        return [
            torch.Size(shape).numel() * _dtype(dtype).itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


def pack(tensors: Mapping[str, torch.Tensor]) -> tuple[Layout, torch.Tensor]:
    """Copies tensors of one device into one new buffer there.

    Returns: the layout, and uint8 [nbytes]; the bytes between two tensors have no meaning.
    """
    values = list(tensors.values())
    padded = [-(-value.numel() * value.element_size() // _ALIGNMENT) * _ALIGNMENT for value in values]
    *starts, nbytes = accumulate(padded, initial=0)
    layout = Layout(
        list(tensors),
        [str(value.dtype).removeprefix("torch.") for value in values],
        [list(value.shape) for value in values],
        starts,
        nbytes,
    )
    buffer = torch.empty(nbytes, dtype=torch.uint8, device=values[0].device)
    for view, value in zip(unpack(layout, buffer).values(), values, strict=True):
        view.copy_(value)
    return layout, buffer


def unpack(layout: Layout, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns: the tensors as views of ``buffer``.

    Raises: ValueError where the buffer is not of the layout's size.
    """
    if buffer.numel() != layout.nbytes:
        raise ValueError(f"a buffer of {buffer.numel()} bytes for a layout of {layout.nbytes}")
    return {
        name: buffer[start : start + size].view(_dtype(dtype)).view(shape)
        for name, dtype, shape, start, size in zip(
            layout.names, layout.dtypes, layout.shapes, layout.starts, layout.sizes(), strict=True
        )
    }
