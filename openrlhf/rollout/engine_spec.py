"""What an engine is started with; importable without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_MIN_CACHE_BYTES, _MAX_CACHE_BYTES = 64 * 2**20, 4 * 2**30
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# vLLM's own 2,048 for engines that are no server cut the prompts of a rollout into many small steps.
_BATCHED_TOKENS = 8192


@dataclass(frozen=True)
class EngineSpec:
    """What one engine is started with.

    Attributes:
        model: HF folder or hub name.
        dtype: "float32", "bfloat16" or "float16"; the trainer's, so that log-probs are comparable.
        max_model_len: tokens of prompt and response together.
        max_num_seqs: sequences generated side by side.
        enable_sleep: the engine's GPU memory can be freed and taken back.
        kv_cache_bytes: memory of the KV cache on a CPU; None on a GPU, where ``gpu_memory_utilization`` decides.
        extra: further engine arguments, as vLLM names them; they win.
    """

    model: str
    dtype: str
    max_model_len: int
    seed: int
    max_num_seqs: int
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    enable_prefix_caching: bool = False
    enable_sleep: bool = False
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None
    trust_remote_code: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


def batched_tokens(spec: EngineSpec) -> int:
    """Returns: tokens that one forward of an engine takes at most."""
    on_cpu = spec.kv_cache_bytes is not None
    if on_cpu or spec.extra.get("enable_chunked_prefill") is False:
        # A prompt goes through in one piece.
        return max(_BATCHED_TOKENS, spec.max_model_len)
    # vLLM tries this many at the start, and some models have no more places than the context.
    sequences = spec.extra.get("max_num_seqs", spec.max_num_seqs)
    return min(_BATCHED_TOKENS, sequences * spec.max_model_len)


def cpu_cache_bytes(model: str, tokens: int, param_dtype: str, trust_remote_code: bool) -> int:
    """KV cache for ``tokens`` tokens, so that an engine on a CPU takes what it needs and not half of the memory.

    Args:
        tokens: of all sequences that are generated side by side.

    Returns:
        Bytes, between 64 MiB and 4 GiB; with fewer than needed the engine works on fewer sequences at a time.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * width * _BYTES[param_dtype]
    return max(_MIN_CACHE_BYTES, min(_MAX_CACHE_BYTES, 2 * tokens * per_token))
