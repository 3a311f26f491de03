"""Tiny models with adapters, and what tests ask of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from openrlhf.config import LoraConfig
from openrlhf.data.packed_batch import PackedBatch, pack_rows
from openrlhf.models.adapters import NAME, adapter_layers, plain_weights
from openrlhf.models.forward import score_tokens
from openrlhf.models.loading import load_causal_lm

LORA = LoraConfig(rank=4, alpha=8)


def load(folder: Path, lora: LoraConfig | None = LORA, **options: Any) -> Any:
    dtype = options.pop("dtype", torch.float32)
    device = options.pop("device", "cpu")
    return load_causal_lm(folder, dtype=dtype, device=device, lora=lora, **options).eval()


def moved(model: Any) -> Any:
    """The same model, with adapters that change what it says."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in adapter_layers(model).values():
            weight = layer.lora_B[NAME].weight
            weight.copy_(0.05 * torch.randn(weight.shape, generator=generator))
    return model


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: item.detach() for name, item in model.named_parameters() if item.requires_grad}


def merged(model: Any) -> dict[str, torch.Tensor]:
    return {weight.name: weight.tensor() for weight in plain_weights(model)}


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens[None], use_cache=False).logits


TOKENS = torch.arange(3, 20)


def assert_same_answers_with_a_gradient(model: Any, batch: PackedBatch, tolerance: float) -> None:
    """Log-probs are those that the model gives without a gradient, and all that is trained gets one."""
    with torch.no_grad():
        scored = score_tokens(model, batch).logprobs
    loss = score_tokens(model, batch).logprobs
    assert (loss - scored).abs().max() < tolerance
    loss.sum().backward()
    assert all(item.grad.isfinite().all() and item.grad.any() for item in model.parameters() if item.requires_grad)


def ragged_batch() -> PackedBatch:
    rows = [torch.arange(3, 3 + length) * 7 % 500 + 3 for length in (5, 17, 2)]
    return pack_rows(rows, [torch.arange(row.numel()) > 0 for row in rows])
