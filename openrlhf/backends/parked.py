"""Buffers that give their memory away and get it back in place, so that every view of them stays what it was."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Parked:
    """The content of some tensors, in host memory; their storages are empty until ``restore``."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """
        Args:
            tensors: each as large as its storage, and no two of one storage; where all is zero no copy is held.
        """
        self._held: list[tuple[torch.UntypedStorage, int, torch.Tensor | None]] = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not storage.resizable():
                # Mapped from a file, as a state that was loaded on a CPU is: there is no memory to give away.
                continue
            size, copy = storage.nbytes(), None
            if bool(tensor.any()):
                copy = torch.empty(size, dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
                copy.copy_(_bytes_of(storage))
            self._held.append((storage, size, copy))
            storage.resize_(0)

    def restore(self) -> None:
        """Brings everything back, to the device where it stood."""
        for storage, size, copy in self._held:
            storage.resize_(size)
            content = _bytes_of(storage)
            if copy is None:
                content.zero_()
            else:
                content.copy_(copy)
        self._held = []


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
