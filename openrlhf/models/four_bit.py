"""Frozen weights in 4 bits (nf4): the one place that knows bitsandbytes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from openrlhf.config.errors import ConfigError
from openrlhf.models.value_head import EXPORTED

# Whenever it is imported on a CPU, and transformers does so through peft, bitsandbytes recommends another package.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


# What transformers' models call their output head.
_HEADS = ("lm_head", "embed_out", "output_projection")


def loading_arguments(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Returns: what ``from_pretrained`` needs to hold the linear layers of a model in 4 bits, heads left out.

    nf4 with its constants quantised too, as in QLoRA (Dettmers et al., arXiv 2305.14314), computed in ``dtype``.
    """
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        # Log-probs and scores are computed inside the heads, from their own weights.
        llm_int8_skip_modules=[*_HEADS, EXPORTED],
    )
    return {"quantization_config": quantization, "device_map": {"": str(device)}}


def keep_layout(model: nn.Module) -> None:
    """Has the layers of a model compute in the same way with and without a gradient.

    On some CPUs bitsandbytes lays weights out anew at the first forward without one, for a kernel of bf16 that rounds
    otherwise and through which no gradient comes back, and leaves them so.
    """
    for module in model.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False


def check_head(model: PreTrainedModel, path: str | Path) -> None:
    """Raises ConfigError where the output head was packed too: log-probs are computed from its weight."""
    head = model.get_output_embeddings()
    if head is not None and is_four_bit(head.weight):
        raise ConfigError(
            f"--ds.load_in_4bit: the output head of {path}, a {type(model).__name__}, has none of the names "
            f"{', '.join(_HEADS)}, by which it would be left out; leave the flag out"
        )


def is_four_bit(parameter: nn.Parameter) -> bool:
    """Returns: whether a parameter holds two weights in each byte."""
    return getattr(parameter, "quant_state", None) is not None


def dequantised(parameter: nn.Parameter) -> torch.Tensor:
    """Returns: the weights that a layer computes with, in the dtype that they were loaded in."""
    if not is_four_bit(parameter):
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.detach(), parameter.quant_state)


def whole_numel(parameter: nn.Parameter) -> int:
    """Returns: weights that a parameter stands for, sharded over ranks or packed in bytes."""
    if is_four_bit(parameter):
        return parameter.quant_state.shape.numel()
    # Under ZeRO stage 3 a parameter holds only this rank's part.
    return getattr(parameter, "ds_numel", parameter.numel())


def whole_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Returns: the dtype of the weights that a parameter stands for."""
    return parameter.quant_state.dtype if is_four_bit(parameter) else parameter.dtype
