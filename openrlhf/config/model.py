"""The models of a run: `model` of the supervised commands; `actor`, `ref`, `critic` of RL."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from openrlhf.config.optimizer import OptimizerConfig, adamw

PolicyLoss = Literal["ppo", "gspo", "cispo", "sapo", "gmpo"]
PreferenceLoss = Literal["dpo", "ipo", "kto", "orpo", "simpo"]

# Optimizer flags stand directly under their owner: --actor.adam.lr, and --adam.lr in the supervised commands.
OwnOptimizer = Annotated[OptimizerConfig, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class ModelConfig:
    """The trained model."""

    model_name_or_path: str | None = None
    """Folder or hub name of the model to start from."""
    gradient_checkpointing_enable: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    gradient_checkpointing_reentrant: bool = False
    """Use torch's reentrant variant of gradient checkpointing."""
    aux_loss_coef: float = 0.0
    """Weight of the router balancing loss of mixture-of-experts models."""


@dataclass(frozen=True)
class SFTModelConfig(ModelConfig):
    """The trained model of SFT."""

    pretrain_mode_enable: bool = False
    """Train on every token of the text instead of on the response only."""


@dataclass(frozen=True)
class RMModelConfig(ModelConfig):
    """The trained reward model and its loss."""

    compute_fp32_loss_enable: bool = False
    """Compute the preference loss in fp32."""
    margin_loss_enable: bool = False
    """Subtract each pair's margin (column `margin`) inside the loss."""
    loss_type: str = "sigmoid"
    """Preference loss: sigmoid or logexp."""


@dataclass(frozen=True)
class DPOModelConfig(ModelConfig):
    """The trained model of DPO and its loss."""

    beta: float = 0.1
    """Strength of the pull towards the reference model; orpo: weight of the odds ratio; simpo: scale of the reward."""
    loss_type: PreferenceLoss = "dpo"
    """Preference loss: dpo, ipo, kto, or without a reference model orpo or simpo."""
    ipo_enable: bool = False
    """Use the IPO loss, as --model.loss_type ipo does."""
    ipo_sum_enable: bool = False
    """IPO over sums of log-probs, whose target depends on lengths, instead of means over tokens."""
    kto_desirable_weight: float = 1.0
    """Weight of the chosen responses in kto."""
    kto_undesirable_weight: float = 1.0
    """Weight of the rejected responses in kto."""
    simpo_gamma: float = 0.5
    """Margin that simpo asks for."""
    label_smoothing: float = 0.0
    """Probability that a preference label is wrong (conservative DPO), of dpo and simpo."""
    nll_loss_coef: float = 0.0
    """Weight of the log-likelihood loss on the chosen response."""

    @property
    def loss(self) -> PreferenceLoss:
        """The loss that both flags together ask for."""
        return "ipo" if self.ipo_enable else self.loss_type

    @property
    def has_reference(self) -> bool:
        """Whether the loss looks at a reference model."""
        return self.loss in ("dpo", "ipo", "kto")


@dataclass(frozen=True)
class DPORefConfig:
    """The reference model of DPO."""

    model_name_or_path: str | None = None
    """Folder or hub name; unset takes the model that training starts from."""
    offload: bool = False
    """Keep the reference model in host memory between its forwards."""
    precompute: bool = False
    """Compute the reference's log-probs once before training, so that only one model is in memory at a time."""


@dataclass(frozen=True)
class PlacementConfig:
    """Where a group of workers runs."""

    num_nodes: int = 1
    """Nodes that the group spans."""
    num_gpus_per_node: int = 8
    """GPUs, one worker each, on every node; counts workers where there is no GPU."""

    @property
    def world_size(self) -> int:
        """Workers of the group, over all nodes."""
        return self.num_nodes * self.num_gpus_per_node


@dataclass(frozen=True)
class ActorConfig(PlacementConfig):
    """The policy and its loss."""

    model_name_or_path: str | None = None
    """Folder or hub name of the policy to start from; the reference model is the same."""
    gradient_checkpointing_enable: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    gradient_checkpointing_reentrant: bool = False
    """Use torch's reentrant variant of gradient checkpointing."""
    eps_clip: float = 0.2
    """PPO clip: the probability ratio counts up to 1 - eps and 1 + eps."""
    eps_clip_low_high: tuple[float, float] | None = None
    """Separate lower and upper PPO clip; replaces eps_clip."""
    dual_clip: float | None = None
    """Bound on the loss of samples with negative advantage, as a multiple of it; above 1."""
    policy_loss_type: PolicyLoss = "ppo"
    """Policy loss: ppo (ratio of each token), gspo (ratio of each sequence), cispo, sapo or gmpo."""
    aux_loss_coef: float = 0.0
    """Weight of the router balancing loss of mixture-of-experts models."""
    entropy_coef: float | None = None
    """Weight of an entropy bonus; unset or 0 adds none."""
    freeze_visual_encoder: bool = False
    """Do not train the vision tower of a vision-language model."""
    optimizer: OwnOptimizer = field(default_factory=lambda: adamw(1e-6))


@dataclass(frozen=True)
class RefConfig(PlacementConfig):
    """The frozen reference model that KL is measured to; not started where --algo.kl.init_coef is 0."""

    offload: bool = False
    """Keep the reference model in host memory between its forwards."""


@dataclass(frozen=True)
class CriticConfig(PlacementConfig):
    """The value model of the gae estimator."""

    model_name_or_path: str | None = None
    """Folder or hub name; unset takes the reward model, or else the policy."""
    fresh_head: bool = False
    """Draw a new value head for --critic.model_name_or_path, which must have one otherwise."""
    value_clip: float = 0.5
    """How far a value may move from its old one inside the value loss."""
    freezing_steps: int = -1
    """Train the critic alone, not the actor, for this many first steps; -1 never."""
    save_value_network: bool = False
    """Export the value model beside the policy at the end."""
    optimizer: OwnOptimizer = field(default_factory=lambda: adamw(9e-6))
