"""Attention over packed rows: which kernel, and one of ours that needs nothing but PyTorch."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.masking_utils import sdpa_mask

from openrlhf.config.errors import ConfigError
from openrlhf.config.kernels import FLASH_PACKAGES, SEGMENT, check_installed, check_runs

# Rows are padded into one call rather than looped over while that costs at most this much more work.
PADDING_WASTE = 1.5


def _band(length: int, window: int, device: torch.device) -> torch.Tensor:
    """bool [length, length]: causal, and at most ``window`` tokens back, the token itself counted."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril().triu(1 - window)


def _causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, **kwargs: Any
) -> torch.Tensor:
    length = query.shape[2]
    if window is not None and window < length:
        return scaled_dot_product_attention(query, key, value, attn_mask=_band(length, window, query.device), **kwargs)
    return scaled_dot_product_attention(query, key, value, is_causal=True, **kwargs)


def _as_one_padded_call(
    states: list[torch.Tensor], lengths: list[int], window: int | None, **kwargs: Any
) -> torch.Tensor:
    """Rows [1, heads, T, d] -> [N, heads, longest, d] and back; padding stands at the end, unseen by all before."""
    device = states[0].device
    sizes = torch.tensor(lengths, device=device)
    starts = sizes.cumsum(0) - sizes
    offsets = torch.arange(max(lengths), device=device)
    places = (starts[:, None] + torch.minimum(offsets, sizes[:, None] - 1)).flatten()
    padded = [state[0].index_select(1, places).unflatten(1, (len(lengths), -1)).transpose(0, 1) for state in states]
    out = _causal(*padded, window, **kwargs).transpose(0, 1).flatten(1, 2)
    real = (offsets < sizes[:, None]).flatten().nonzero().flatten()
    return out.index_select(1, real)[None]


def segment_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    segment_lengths: list[int] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each row of a packed batch.

    Args:
        query: [B, heads, T, d]; ``key`` and ``value`` may have fewer heads.
        attention_mask: None, or what ``sdpa_mask`` made for a call that is not packed.
        sliding_window: tokens that one token sees, itself included.
        segment_lengths: tokens of each row (B is 1 then); None means that every batch row is one row.

    Returns: [B, T, heads, d] and no attention weights.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ConfigError(f"--ds.attn_implementation {SEGMENT} cannot compute {name}; take eager")
    options = {"scale": scaling, "dropout_p": dropout, "enable_gqa": key.shape[1] != query.shape[1]}
    if attention_mask is not None:
        out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, **options)
    elif segment_lengths is None or len(segment_lengths) == 1:
        out = _causal(query, key, value, sliding_window, **options)
    elif len(segment_lengths) * max(segment_lengths) <= PADDING_WASTE * query.shape[2]:
        out = _as_one_padded_call([query, key, value], segment_lengths, sliding_window, **options)
    else:
        # split, not slices: the backward of N slices would fill N tensors of full length.
        parts = zip(*(state.split(segment_lengths, dim=2) for state in (query, key, value)), strict=True)
        out = torch.cat([_causal(*part, sliding_window, **options) for part in parts], dim=2)
    return out.transpose(1, 2).contiguous(), None


def _segment_mask(q_length: int, kv_length: int, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
    """No mask where ``segment_attention`` knows all by itself; a real one for padded batches and for decoding."""
    if attention_mask is None and q_length == kv_length:
        return None
    return sdpa_mask(q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs)


AttentionInterface.register(SEGMENT, segment_attention)
AttentionMaskInterface.register(SEGMENT, _segment_mask)


def _segment_fits(config: PretrainedConfig, model_class: type) -> bool:
    """Whether rows, causality and a sliding window are all there is to this model's attention.

    A model that flash attention can run tells its kernel everything by arguments and nothing by a mask; chunked or
    partly bidirectional attention (images) is told by a mask, which ours would not see.
    """
    text_config = config.get_text_config()
    layer_types = set(getattr(text_config, "layer_types", None) or ["full_attention"])
    parameters = inspect.signature(model_class.forward).parameters.values()
    return (
        model_class._supports_sdpa
        and model_class._supports_flash_attn
        # Some look their kernels up in a table of their own, which does not know ours.
        and model_class._supports_attention_backend
        and layer_types <= {"full_attention", "sliding_attention"}
        and text_config is config
        and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    )


def choose_attention(
    config: PretrainedConfig, model_class: type, requested: str, device: torch.device, dtype: torch.dtype
) -> str:
    """Picks the attention implementation that transformers is told.

    Args:
        requested: ``--ds.attn_implementation``; "auto" takes the best that is installed and that can run there.
        dtype: of the weights; flash attention takes 16 bits alone.

    Raises:
        ConfigError: a kernel was asked for by name and is not installed, or cannot run there.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    if requested != "auto":
        check_runs(requested, device=device.type, half=half)
        check_installed(requested)
        return requested
    if device.type == "cuda" and half and model_class._supports_flash_attn:
        for name, package in FLASH_PACKAGES.items():
            if find_spec(package) is not None:
                return name
    if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None or not model_class._supports_sdpa:
        # SDPA has no soft-capping, and transformers leaves it out there without a word.
        return "eager"
    if device.type == "cpu" and _segment_fits(config, model_class):
        return SEGMENT
    return "sdpa"


def packing_arguments(implementation: str, cu_seqlens: torch.Tensor) -> dict[str, Any]:
    """What a kernel must be told about rows beyond ``position_ids``.

    Args:
        cu_seqlens: int32 [N + 1].
    """
    if implementation == SEGMENT:
        return {"segment_lengths": cu_seqlens.diff().tolist()}
    if implementation in FLASH_PACKAGES:
        longest = int(cu_seqlens.diff().max())
        return {
            "cu_seq_lens_q": cu_seqlens,
            "cu_seq_lens_k": cu_seqlens,
            "max_length_q": longest,
            "max_length_k": longest,
        }
    return {}
