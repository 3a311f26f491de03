"""Safetensors files written as tensors come: never more than one file's worth of them is held."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

# Bytes of one file, as hubs and transformers have it.
MAX_SHARD_BYTES = 5 * 10**9


class ShardWriter:
    """Cuts and names files as ``save_pretrained`` does, which wants all tensors at once to count the files.

    Args:
        folder: exists, and holds no weights yet.
        max_bytes: of one file; a larger tensor gets a file of its own.
    """

    def __init__(self, folder: Path, max_bytes: int = MAX_SHARD_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._held: dict[str, torch.Tensor] = {}
        self._held_bytes = 0
        self._total_bytes = 0
        # What each file holds; they get their names when their number is known.
        self._files: list[list[str]] = []
        self._written: set[str] = set()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes a copy of ``tensor``, which may be freed or changed afterwards.

        Raises: ValueError for a second tensor of one name, and whatever writing a file may.
        """
        if name in self._held or name in self._written:
            raise ValueError(f"the weight {name} was written already, with other values")
        copy = tensor.detach().to("cpu", copy=True).contiguous()
        self._total_bytes += copy.nbytes
        if copy.nbytes > self._max_bytes:
            self._write({name: copy})
            return
        if self._held_bytes + copy.nbytes > self._max_bytes:
            self._flush()
        self._held[name] = copy
        self._held_bytes += copy.nbytes

    def finish(self, parameters: int) -> None:
        """Writes what is left, and the index where there are several files.

        Args:
            parameters: elements of all weights of the model.

        Raises: whatever writing a file may.
        """
        if self._held:
            self._flush()
        if len(self._files) == 1:
            self._temporary(0).rename(self._folder / SAFE_WEIGHTS_NAME)
            return
        places: dict[str, str] = {}
        stem, suffix = SAFE_WEIGHTS_NAME.split(".")
        for index, names in enumerate(self._files):
            file = f"{stem}-{index + 1:05d}-of-{len(self._files):05d}.{suffix}"
            self._temporary(index).rename(self._folder / file)
            places |= dict.fromkeys(names, file)
        sizes = {"total_parameters": parameters, "total_size": self._total_bytes}
        content = json.dumps({"metadata": sizes, "weight_map": places}, indent=2, sort_keys=True)
        (self._folder / SAFE_WEIGHTS_INDEX_NAME).write_text(content + "\n")

    def _flush(self) -> None:
        held, self._held, self._held_bytes = self._held, {}, 0
        self._write(held)

    def _write(self, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, self._temporary(len(self._files)), metadata={"format": "pt"})
        self._files.append(list(tensors))
        self._written |= tensors.keys()

    def _temporary(self, index: int) -> Path:
        return self._folder / f"part-{index}.safetensors"
