"""How weights move: the optimizer, its learning-rate schedule and the clip. Flags under the owner's name."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class AdamConfig:
    """AdamW."""

    lr: float = 1e-6
    """Peak learning rate, reached when the warm-up ends."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running mean of the gradient and of its square."""
    eps: float = 1e-8
    """Added to the denominator of the update."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""


@dataclass(frozen=True)
class MuonConfig:
    """Muon for the matrices of hidden layers; embeddings, heads and vectors stay with AdamW, whose weight decay both
    share."""

    lr: float = 0.02
    """Peak learning rate of the matrices."""
    momentum: float = 0.95
    """Decay of the momentum buffer."""
    ns_steps: int = 5
    """Newton-Schulz iterations of an update."""
    nesterov: bool = True
    """Nesterov momentum."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer of one trained model."""

    optim: Literal["adam", "muon"] = "adam"
    """Which optimizer moves the weights; muon takes the matrices of hidden layers, and AdamW all else."""
    lr_scheduler: str = "cosine_with_min_lr"
    """Name of the learning-rate schedule, as transformers knows it (constant, linear, cosine, ...)."""
    lr_warmup_ratio: float = 0.03
    """Share of all optimizer steps that the learning rate takes to rise from 0."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a share of the peak; only for schedules that have a floor."""
    max_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down; 0 turns the clip off."""
    adam: AdamConfig = field(default_factory=AdamConfig)
    muon: MuonConfig = field(default_factory=MuonConfig)

    def fixed(self, prefix: str) -> dict[str, Any]:
        """Returns: by flag, what a resumed run must share with the one that it goes on from.

        Args:
            prefix: stands before the names of the flags: ``actor.``, or nothing.
        """
        values: dict[str, Any] = {
            "optim": self.optim,
            "lr_scheduler": self.lr_scheduler,
            "lr_warmup_ratio": self.lr_warmup_ratio,
            "min_lr_ratio": self.min_lr_ratio,
        }
        values |= {f"adam.{name}": value for name, value in asdict(self.adam).items()}
        if self.optim == "muon":
            values |= {f"muon.{name}": value for name, value in asdict(self.muon).items()}
        return {f"--{prefix}{name}": value for name, value in values.items()}


def adamw(lr: float) -> OptimizerConfig:
    """Returns: the default optimizer at another peak learning rate."""
    return OptimizerConfig(adam=AdamConfig(lr=lr))
