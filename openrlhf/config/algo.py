"""The RL mathematics: the `algo` group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

Estimator = Literal["gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo", "opo"]
LossAggregation = Literal["token_mean", "seq_mean", "constant"]

# They compare the samples of one prompt with each other, so that one sample alone teaches nothing.
GROUP_ESTIMATORS = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo", "opo")
# They scale advantages by their standard deviation over the batch, unless no_std_norm is set.
WHITENING_ESTIMATORS = ("gae", "reinforce", "reinforce_baseline")


SEQUENCE_LOSSES = ("gspo", "gmpo")
"""Policy losses with one ratio for each sequence, whose loss is a mean over sequences."""


def default_aggregation(estimator: Estimator, policy_loss: str) -> LossAggregation:
    """Returns: how token losses become one number where no flag says."""
    if policy_loss in SEQUENCE_LOSSES:
        return "seq_mean"
    return "constant" if estimator == "dr_grpo" else "token_mean"


@dataclass(frozen=True)
class AdvantageConfig:
    """Advantages from rewards."""

    estimator: Estimator = "gae"
    """gae, reinforce (REINFORCE++), reinforce_baseline (REINFORCE++-baseline), rloo, group_norm (GRPO), dr_grpo, opo"""
    gamma: float = 1.0
    """Discount of a reward for each token that the policy produced after it."""
    lambd: float = 1.0
    """Lambda of gae."""
    no_std_norm: bool = False
    """Centre advantages without dividing by their standard deviation."""
    is_correction_enable: bool = False
    """Weigh tokens by the trainer's probability over the engine's."""
    is_correction_threshold: tuple[float, float] = (0.5, 5.0)
    """Lower and upper bound of those weights."""
    is_correction_type: Literal["tis", "icepop", "seq-mask-tis"] = "tis"
    """tis clamps token weights, icepop drops tokens outside the bounds, seq-mask-tis drops whole samples."""


@dataclass(frozen=True)
class KLConfig:
    """The pull towards the reference model."""

    init_coef: float = 0.01
    """Coefficient of the KL; 0 starts no reference model."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """KL estimator: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, with d = log-prob minus reference log-prob."""
    use_loss: bool = False
    """Put the KL into the loss instead of the reward; not with k1, whose gradient there is zero on average."""
    target: float | None = None
    """Adapt the coefficient so that the KL comes near this value; unset keeps it fixed."""
    horizon: int = 10000
    """Samples over which the coefficient adapts."""
    corrected: bool = False
    """Weigh the KL in the loss by the probability ratio, so that its gradient stays right after the first update."""

    @property
    def enabled(self) -> bool:
        """Whether there is a KL, and so a reference model, at all."""
        return self.init_coef > 0


@dataclass(frozen=True)
class AlgoConfig:
    """Algorithm."""

    dynamic_filtering_enable: bool = False
    """Train only on groups whose scores lie inside --algo.dynamic_filtering_range."""
    dynamic_filtering_range: tuple[float, float] = (0.0, 1.0)
    """Exclusive bounds of a group's score."""
    loss_aggregation: Annotated[LossAggregation | None, tyro.conf.arg(metavar="{token_mean,seq_mean,constant}")] = None
    """How token losses become one number: token_mean, seq_mean or constant; unset takes what estimator and loss ask."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    kl: KLConfig = field(default_factory=KLConfig)
