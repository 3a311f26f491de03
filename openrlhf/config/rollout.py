"""Generation: the `rollout` and `vllm` groups."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any

from tyro.constructors import PrimitiveConstructorSpec

JsonObject = Annotated[
    dict[str, Any],
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda args: json.loads(args[0]),
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [json.dumps(value)],
    ),
]


@dataclass(frozen=True)
class RolloutConfig:
    """Samples that the policy draws."""

    batch_size: int = 1024
    """Prompts of one rollout."""
    n_samples_per_prompt: int = 1
    """Samples drawn for each prompt; they form the group of the group estimators."""
    vllm_generate_batch_size: int | None = None
    """Prompts in generation at once, above --rollout.batch_size (needs --train.async_enable); unset means equal."""
    micro_batch_size: int = 1
    """Samples of one forward when log-probs are computed."""
    max_tokens_per_gpu: int | None = None
    """Token budget of such a forward under --train.dynamic_batch_enable; unset takes --train.max_tokens_per_gpu."""
    max_new_tokens: int | None = None
    """Longest response in tokens; unset means whatever the prompt leaves of --data.max_len."""
    temperature: float = 1.0
    """Sampling temperature; log-probs are computed at the same temperature."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this probability."""
    save_samples: int = 16
    """Samples of every step that are written to rollouts.jsonl."""


@dataclass(frozen=True)
class VllmConfig:
    """The rollout engines."""

    num_engines: int = 1
    """Number of engines; with --train.colocate_all the actor's GPUs, or a multiple of them: each then has several."""
    tensor_parallel_size: int = 1
    """GPUs of one engine."""
    sync_backend: str = "nccl"
    """How weights reach the engines: auto, nccl, ipc, gloo or shm; nccl becomes ipc on shared GPUs, shm on the CPU."""
    sync_with_ray: bool = False
    """Send weights through Ray's collective library."""
    enable_prefix_caching: bool = False
    """Let engines reuse the cache of common prefixes; it is emptied at every weight update."""
    enforce_eager: bool = False
    """Run engines without CUDA graphs."""
    enable_sleep: bool = False
    """Let engines free their GPU memory while the models that share it train."""
    gpu_memory_utilization: float = 0.95
    """Share of a GPU's memory that an engine may take."""
    extra: JsonObject = field(default_factory=dict)
    """Further engine arguments of vLLM as a JSON object, e.g. '{"max_num_seqs": 64}'; none that other flags decide."""
    start_timeout: float = 900.0
    """Seconds that an engine may take to start."""
