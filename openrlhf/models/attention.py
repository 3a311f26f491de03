"""Attention over packed rows: which kernel, and two of ours that need nothing but PyTorch."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.masking_utils import sdpa_mask

from openrlhf.config.errors import ConfigError
from openrlhf.config.kernels import FLAG, FLASH_PACKAGES, OURS, SEGMENT, VARLEN, check_installed, check_runs

# Rows are padded into one call while that costs at most this much more work than each row alone.
PADDING_WASTE = 1.5

# Largest size of a head in PyTorch's flash kernels, and what it has to be a multiple of.
FLASH_HEAD_LIMIT, FLASH_HEAD_STEP = 256, 8

# PyTorch 2.11's varlen_attn hands fewer key heads to the kernel unasked, later ones want to be told.
ASKS_FOR_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


def _band(length: int, window: int, device: torch.device) -> torch.Tensor:
    """bool [length, length]: causal, and at most ``window`` tokens back, the token itself counted."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril().triu(1 - window)


def _sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
) -> torch.Tensor:
    """Attention under ``mask``, or causal where there is none. Shapes as ``segment_attention``."""
    groups = query.shape[1] // key.shape[1]
    # On GPUs only the flash kernel shares key heads; asked of another, PyTorch writes out all scores instead.
    flash = mask is None and query.element_size() == 2 and key.shape[-1] == value.shape[-1] <= FLASH_HEAD_LIMIT
    shared = groups > 1 and (query.device.type == "cpu" or flash)
    if groups > 1 and not shared:
        key, value = (state.repeat_interleave(groups, dim=1, output_size=query.shape[1]) for state in (key, value))
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=shared, **kwargs
    )


def _causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, **kwargs: Any
) -> torch.Tensor:
    length = query.shape[2]
    banded = window is not None and window < length
    return _sdpa(query, key, value, _band(length, window, query.device) if banded else None, **kwargs)


@lru_cache(maxsize=16)
def _groups(lengths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Rows that share one padded call, by their numbers: the longest first, as many as ``PADDING_WASTE`` allows."""
    groups: list[list[int]] = []
    tokens = 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and (len(groups[-1]) + 1) * longest <= PADDING_WASTE * (tokens + lengths[row]):
            groups[-1].append(row)
            tokens += lengths[row]
        else:
            groups.append([row])
            tokens = lengths[row]
    return tuple(map(tuple, groups))


def _padded(rows: list[torch.Tensor]) -> torch.Tensor:
    """Rows [length, heads, d], the longest first -> [N, heads, longest, d]; the padding stands at the end, where no
    token sees it.
    """
    longest = rows[0].shape[0]
    parts = []
    for row in rows:
        parts += [row] if row.shape[0] == longest else [row, row.new_zeros(longest - row.shape[0], *row.shape[1:])]
    # Whole pieces end to end: no index has to reach the device, and the backward adds nothing up.
    return torch.cat(parts).unflatten(0, (len(rows), longest)).transpose(1, 2)


def _unpadded(out: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    """[N, heads, longest, d] -> N rows [length, heads, d]."""
    longest = out.shape[2]
    sizes = [size for length in lengths for size in (length, longest - length)]
    return list(out.transpose(1, 2).flatten(0, 1).split(sizes)[::2])


def _by_groups(
    states: tuple[torch.Tensor, ...], lengths: tuple[int, ...], window: int | None, **kwargs: Any
) -> torch.Tensor:
    """[1, heads, T, d] -> [1, T, heads, d], rows of similar length in one call."""
    query, key, value = ([*state[0].transpose(0, 1).split(lengths)] for state in states)
    out: list[torch.Tensor] = [query[0]] * len(lengths)
    for group in _groups(lengths):
        padded = [_padded([rows[row] for row in group]) for rows in (query, key, value)]
        answers = _unpadded(_causal(*padded, window, **kwargs), [lengths[row] for row in group])
        for row, answer in zip(group, answers, strict=True):
            out[row] = answer
    return torch.cat(out)[None]


class RowLengths:
    """Tokens of each row. An object that compiled layers hand on without a look inside: the entries of a list would
    become constants of their graphs, which every micro-batch would make anew.
    """

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = tuple(lengths)

    def __iter__(self) -> Iterator[int]:
        return iter(self._lengths)


def _refuse_extras(name: str, extras: dict[str, Any]) -> None:
    for extra in ("softcap", "s_aux", "position_bias"):
        if extras.get(extra) is not None:
            raise ConfigError(f"{FLAG} {name} cannot compute {extra}; take eager")


# Compiled around, not into: a graph would be bound to the lengths of one micro-batch.
@torch.compiler.disable
def segment_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    segment_lengths: Iterable[int] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each row of a packed batch.

    Args:
        query: [B, heads, T, d]; ``key`` and ``value`` may have fewer heads.
        attention_mask: None or empty, or what ``sdpa_mask`` made for a call that is not packed.
        sliding_window: tokens that one token sees, itself included.
        segment_lengths: tokens of each row (B is 1 then); None means that every batch row is one row.

    Returns: [B, T, heads, d] and no attention weights.
    """
    _refuse_extras(SEGMENT, kwargs)
    options = {"scale": scaling, "dropout_p": dropout}
    states = (query, key, value)
    if attention_mask is not None and attention_mask.numel():
        out = _sdpa(*states, attention_mask, **options).transpose(1, 2)
    elif len(lengths := tuple(segment_lengths or ())) <= 1:
        out = _causal(*states, sliding_window, **options).transpose(1, 2)
    else:
        out = _by_groups(states, lengths, sliding_window, **options)
    return out.contiguous(), None


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each row of a packed batch, by PyTorch's flash kernel for rows of any length.

    Args: as ``segment_attention``, and
        cu_seq_lens_q: int32 [N + 1] on the GPU; None for a call that is not packed.
        max_length_q: tokens of the longest row.

    Returns: [B, T, heads, d] and no attention weights.
    """
    _refuse_extras(VARLEN, kwargs)
    if cu_seq_lens_q is None:
        return segment_attention(module, query, key, value, attention_mask, scaling, dropout, sliding_window)
    if dropout:
        raise ConfigError(f"{FLAG} {VARLEN} has no dropout, and the model asks for {dropout:g}; take sdpa")
    window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
    out = _varlen(
        *(state[0].transpose(0, 1) for state in (query, key, value)), cu_seq_lens_q, max_length_q, scaling, window
    )
    return out[None], None


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    longest: int,
    scale: float | None,
    window: tuple[int, int],
) -> torch.Tensor:
    """query [T, heads, d]; key and value may have fewer heads, which the kernel shares by itself."""
    shared = {"enable_gqa": True} if ASKS_FOR_GQA and query.shape[1] != key.shape[1] else {}
    return varlen_attn(
        query, key, value, cu_seqlens, cu_seqlens, longest, longest, scale=scale, window_size=window, **shared
    )


def _segment_mask(q_length: int, kv_length: int, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
    """No mask where our kernels know all by themselves; a real one for padded batches and for decoding."""
    if attention_mask is None and q_length == kv_length:
        return None
    return sdpa_mask(q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs)


for _name, _kernel in ((SEGMENT, segment_attention), (VARLEN, varlen_attention)):
    AttentionInterface.register(_name, _kernel)
    AttentionMaskInterface.register(_name, _segment_mask)


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


def _varlen_misfit(config: PretrainedConfig, model_class: type, device: torch.device) -> str | None:
    """Returns: why PyTorch's varlen kernel cannot run this model there; None where it can."""
    if not _segment_fits(config, model_class):
        return f"the attention of a {config.model_type} is more than causal rows and windows"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than Ampere"
    sizes = _head_sizes(config)
    if len(sizes) > 1 or max(sizes) > FLASH_HEAD_LIMIT or max(sizes) % FLASH_HEAD_STEP:
        return (
            f"its heads have size {' and '.join(map(str, sorted(sizes)))}, not one multiple of {FLASH_HEAD_STEP} up "
            f"to {FLASH_HEAD_LIMIT}"
        )
    return None


def _head_sizes(config: PretrainedConfig) -> set[int]:
    """Sizes of query, key and value heads."""
    saved = config.get_text_config().to_dict()
    latent = {saved.get("qk_head_dim"), saved.get("v_head_dim")} - {None}
    return latent or {saved.get("head_dim") or saved["hidden_size"] // saved["num_attention_heads"]}


def choose_attention(
    config: PretrainedConfig, model_class: type, requested: str, device: torch.device, dtype: torch.dtype
) -> str:
    """Picks the attention implementation that transformers is told.

    Args:
        requested: ``--ds.attn_implementation``; "auto" takes the best that is installed and that can run there, "sdpa"
            PyTorch's SDPA row by row where that is all there is to the model's attention.
        dtype: of the weights; flash attention takes 16 bits alone.

    Raises:
        ConfigError: a kernel was asked for by name and is not installed, or cannot run there.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    if requested != "auto":
        check_runs(requested, device=device.type, half=half)
        check_installed(requested)
        if requested == VARLEN and (misfit := _varlen_misfit(config, model_class, device)) is not None:
            raise ConfigError(f"{FLAG} {VARLEN} cannot run {config.name_or_path or 'the model'}: {misfit}; take auto")
        return SEGMENT if requested == "sdpa" and _segment_fits(config, model_class) else requested
    if device.type == "cuda" and half and model_class._supports_flash_attn:
        for name, package in FLASH_PACKAGES.items():
            if find_spec(package) is not None:
                return name
    if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None or not model_class._supports_sdpa:
        # SDPA has no soft-capping, and transformers leaves it out there without a word.
        return "eager"
    if device.type == "cuda" and half and _varlen_misfit(config, model_class, device) is None:
        return VARLEN
    return SEGMENT if _segment_fits(config, model_class) else "sdpa"


def packing_arguments(implementation: str, cu_seqlens: torch.Tensor, lengths: list[int]) -> dict[str, Any]:
    """What a kernel must be told about rows beyond ``position_ids``.

    Args:
        cu_seqlens: int32 [N + 1], on the model's device.
        lengths: tokens of each row, which stand in host memory: reading them off a GPU would wait for it.
    """
    bounds = {
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
    if implementation in FLASH_PACKAGES:
        return bounds
    if implementation not in OURS:
        return {}
    # A mask of four dimensions is handed on as it is. With none, transformers reads the borders of rows off the
    # positions, for which the host waits for the GPU, to make a mask that is not needed.
    no_mask = torch.empty(1, 1, 0, 0, dtype=torch.bool, device=cu_seqlens.device)
    rows = bounds if implementation == VARLEN else {"segment_lengths": RowLengths(lengths)}
    return {"attention_mask": no_mask, **rows}
