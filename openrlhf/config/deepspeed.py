"""How a model is loaded and sharded: the `ds` group of every command."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Experts = Literal["eager", "batched_mm", "grouped_mm", "deepgemm"]

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters; off while the rank is 0."""

    rank: int = 0
    """Rank of the adapters; 0 trains the whole model."""
    alpha: int = 16
    """Scale of the adapters: their product is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    """Names of the linear layers that get an adapter; all-linear stands for all but the output head."""
    dropout: float = 0.0
    """Dropout in front of the adapters."""


@dataclass(frozen=True)
class PrecisionConfig:
    """The number format of the weights."""

    param_dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Number format in which models compute; the rollout engine uses the same."""


@dataclass(frozen=True)
class LoadingConfig(PrecisionConfig):
    """What decides how a model is loaded and run."""

    attn_implementation: str = "auto"
    """Attention kernel: auto (the best that is installed and runs on the device), eager, sdpa, torch_varlen (PyTorch's
    flash kernel over packed rows), flash_attention_2, flash_attention_3."""
    experts_implementation: Experts | None = None
    """Kernel for the experts of a mixture-of-experts model; unset leaves the choice to transformers."""
    load_in_4bit: bool = False
    """Hold frozen linear layers as 4-bit nf4; in training, those below adapters."""
    packing_samples: bool = True
    """Lay rows end to end without padding; --ds.no_packing_samples runs padded batches instead."""


@dataclass(frozen=True)
class DeepSpeedConfig(LoadingConfig):
    """DeepSpeed and the model it trains."""

    zero_stage: int = 2
    """ZeRO stage: 0 replicates, 1 shards optimizer states, 2 gradients too, 3 weights too."""
    zpg: int = 1
    """Size of the secondary shard group of ZeRO++ (ranks of one node) on stage 3; 1 turns it off."""
    adam_offload: bool = False
    """Keep optimizer states in host memory and step there."""
    use_liger_kernel: bool = False
    """Liger's fused kernels for norms, rotary embeddings and MLPs, on GPUs; needs the package liger-kernel."""
    grad_accum_dtype: str | None = None
    """Number format in which gradients of micro-batches are added up: fp32, as unset, or bf16 for bf16 weights."""
    overlap_comm: bool = False
    """Reduce gradients while the backward pass goes on; on ZeRO stage 2 alone."""
    deepcompile: bool = False
    """Compile with DeepSpeed's graph passes: refused, since they do not go with gradients whose steps we count; take
    --ds.torch_compile."""
    torch_compile: bool = False
    """Compile the decoder layers with torch.compile; takes a minute at the first step."""
    tensor_parallel_size: int = 1
    """Ranks that share each weight matrix in training."""
    ring_attn_size: int = 1
    """Ranks that share one sequence; divides the number of ranks."""
    ring_attn_head_stride: int = 1
    """Attention heads that one round of ring attention handles at a time."""
    use_universal_ckpt: bool = False
    """Resume on another number of ranks: the state is converted once, inside its checkpoint."""
    lora: LoraConfig = field(default_factory=LoraConfig)

    @property
    def adapter_flags(self) -> dict[str, Any]:
        """By flag, what a run that goes on must share, with adapters (rank above 0) or without."""
        rank = {"--ds.lora.rank": self.lora.rank}
        if self.lora.rank == 0:
            return rank
        return rank | {
            "--ds.lora.alpha": self.lora.alpha,
            "--ds.lora.dropout": self.lora.dropout,
            "--ds.lora.target_modules": sorted(self.lora.target_modules),
            "--ds.load_in_4bit": self.load_in_4bit,
        }


@dataclass(frozen=True)
class RMDeepSpeedConfig(DeepSpeedConfig):
    """DeepSpeed and a model with a scalar head."""

    value_head_prefix: str = "score"
    """Attribute name of the scalar head of reward and value models."""


@dataclass(frozen=True)
class PPODeepSpeedConfig(RMDeepSpeedConfig):
    """DeepSpeed beside rollout engines."""

    enable_sleep: bool = False
    """Move training state off the accelerator while the engines that share it generate."""


@dataclass(frozen=True)
class ServeDeepSpeedConfig(LoadingConfig):
    """Loading of a served reward model."""

    value_head_prefix: str = "score"
    """Attribute name of the scalar head."""
