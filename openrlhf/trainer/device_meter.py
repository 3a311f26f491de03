"""What one rank does with its device: memory and time of its optimizer steps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from openrlhf.backends.base import Backend
from openrlhf.trainer.flops import ModelFlops, model_flops, peak_flops

GIB = 2**30


@dataclass(frozen=True)
class Usage:
    """What a rank did since it was asked before.

    Attributes:
        peak_gib: most memory that its tensors took at one time; None on a CPU.
        seconds: in optimizer steps.
        flops: of its model; None where that is not known.
        peak_flops: of its device; None where that is not known, and for weights of 32 bits, which have another peak.
    """

    peak_gib: float | None
    seconds: float
    flops: ModelFlops | None
    peak_flops: float | None


class DeviceMeter:
    """Measures one rank; on a CPU only the time."""

    def __init__(self, backend: Backend) -> None:
        self._device = backend.device
        self._seconds = 0.0
        self._flops: ModelFlops | None = None
        self._peak: float | None = None
        if self._device.type == "cuda":
            self._flops = model_flops(backend.module)
            if next(backend.module.parameters()).dtype in (torch.bfloat16, torch.float16):
                self._peak = peak_flops(torch.cuda.get_device_name(self._device))

    @contextmanager
    def training(self) -> Iterator[None]:
        """Adds the time of the body, which ends with a number that the device computed."""
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start

    def take(self) -> Usage:
        """Returns: what was measured, and begins anew."""
        peak = None
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device) / GIB
            torch.cuda.reset_peak_memory_stats(self._device)
        usage = Usage(peak, self._seconds, self._flops, self._peak)
        self._seconds = 0.0
        return usage


def peak_memory(ranks: Sequence[Usage]) -> float | None:
    """Returns: GiB of the rank that took most; None on CPUs."""
    return max((rank.peak_gib for rank in ranks if rank.peak_gib is not None), default=None)


def utilisation(ranks: Sequence[Usage], lengths: Iterable[int], passes: int = 1) -> float | None:
    """Model FLOPs utilisation of the optimizer steps of all ranks of a model, by the slowest rank.

    Args:
        lengths: tokens of each row that they were trained on together, ``passes`` times.

    Returns: a share; None where the model or a device is not known, or nothing was trained.
    """
    seconds, flops = max(rank.seconds for rank in ranks), ranks[0].flops
    peaks = [rank.peak_flops for rank in ranks if rank.peak_flops is not None]
    if flops is None or len(peaks) < len(ranks) or seconds == 0:
        return None
    return passes * flops.training(lengths) / (seconds * sum(peaks))
