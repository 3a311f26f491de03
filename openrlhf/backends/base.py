"""What a trainer may ask of whatever trains a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from openrlhf.data.packed_batch import PackedBatch
from openrlhf.models.scores import TokenScores

__all__ = ["Backend", "StepResult", "TokenScores"]


@dataclass
class StepResult:
    """What one optimizer step did.

    Attributes:
        grad_norm: global norm before clipping; NaN where the step was skipped for overflow.
        skipped: True where no weight moved (fp16 overflow). A skipped step moves no scheduler.
        lr: the learning rate that this step used; under Muon, that of the matrices.
        adam_lr: the learning rate of what AdamW moves beside Muon; None without Muon.
    """

    grad_norm: float
    skipped: bool
    lr: float
    adam_lr: float | None = None

    @property
    def lowest_lr(self) -> float:
        """The learning rate of the weights that moved least."""
        return self.lr if self.adam_lr is None else min(self.lr, self.adam_lr)

    def rate_metrics(self, role: str) -> dict[str, float]:
        """Returns: ``<role>/lr`` and, under Muon, ``<role>/adam_lr``."""
        rates = {f"{role}/lr": self.lr}
        return rates if self.adam_lr is None else rates | {f"{role}/adam_lr": self.adam_lr}


class Backend(Protocol):
    """A model, sharded or not, with or without an optimizer. All methods are collectives over the ranks.

    Attributes:
        module: the transformers model inside.
    """

    rank: int
    world_size: int
    device: torch.device
    module: Any

    def forward(
        self, batch: PackedBatch, *, temperature: float = 1.0, entropy: bool = False, adapters: bool = True
    ) -> TokenScores:
        """Runs the model, or with ``adapters`` False the one below its adapters, on one micro-batch; keeps a gradient
        only in training mode with gradients enabled.
        """

    def values(self, batch: PackedBatch) -> torch.Tensor:
        """Returns: float32 [T], the value of the state before each token, of a model with a scalar head (a critic)."""

    def row_scores(self, batch: PackedBatch) -> torch.Tensor:
        """Returns: float32 [N], the score of each row, of a model with a scalar head (a reward model)."""

    def backward(self, loss: torch.Tensor) -> None:
        """Adds this rank's share: the sum over ranks and micro-batches of what is given here is the loss."""

    def step(self) -> StepResult:
        """Clips, moves the weights, clears the gradients and moves the scheduler."""

    def movement_warning(self) -> str | None:
        """To be called after each ``step``.

        Returns: once in a run, a sentence about trainable weights that do not move; None otherwise.
        """

    def all_reduce(self, value: float, op: str = "sum") -> float:
        """Returns: ``value`` reduced over the ranks ("sum", "max" or "min"), the same on all."""

    def named_full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields: HF names with whole tensors. Every rank must consume it fully and in order."""

    def save_hf(self, folder: Path, *, ema: bool = False) -> None:
        """Writes a folder that transformers loads, of the weights or of their moving average, or one of adapters; the
        tokenizer is not its business.
        """

    def ema_update(self, beta: float) -> None:
        """average <- beta * average + (1 - beta) * weights, after a step that moved them."""

    def save_checkpoint(self, folder: Path, state: dict[str, Any]) -> None:
        """Writes weights, optimizer, scheduler, RNG and ``state`` so that training can go on from here."""

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Returns: the ``state`` that was given to ``save_checkpoint``."""

    def offload(self) -> None:
        """Frees the accelerator's memory that weights and optimizer hold."""

    def reload(self) -> None:
        """Undoes ``offload``."""

    def close(self) -> None:
        """Meets the other ranks and leaves the process group, so that no exit aborts."""
