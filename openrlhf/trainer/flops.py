"""Floating-point operations that training needs, and how many a device can do: model FLOPs utilisation (MFU)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from openrlhf.models.four_bit import whole_numel

# Dense bf16 and fp16 FLOP/s of the tensor cores, from NVIDIA's data sheets, which print twice as much "with sparsity".
# All words must stand in the device's name; the first row that fits counts.
PEAKS: tuple[tuple[str, float], ...] = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H200 NVL", 835e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("B200", 2250e12),
    ("GB200", 2500e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A30", 165e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L4", 121e12),
)


def peak_flops(device_name: str) -> float | None:
    """Returns: what a GPU does at most in a second, by its name; None where that is not known (a slice of one, too)."""
    words = set(re.split(r"[\s-]+", device_name))
    if "MIG" in words:
        return None
    return next((peak for name, peak in PEAKS if words.issuperset(name.split())), None)


@dataclass(frozen=True)
class ModelFlops:
    """What a forward and a backward cost.

    Attributes:
        per_token: operations of all matrices: 6 for each weight that a token is multiplied by, 4 where it is frozen.
        attention: by width of all heads and window (None for none), how many layers attend so.
    """

    per_token: float
    attention: tuple[tuple[float, int | None, int], ...]

    def training(self, lengths: Iterable[int]) -> float:
        """Returns: operations of forward and backward over rows of so many tokens; what is done twice counts once."""
        rows = Counter(lengths)
        total = self.per_token * sum(length * count for length, count in rows.items())
        for width, window, layers in self.attention:
            pairs = sum(count * attended_pairs(length, window) for length, count in rows.items())
            # Scores and weighted sum, 2 operations each, and twice as many in the backward.
            total += 12 * width * layers * pairs
        return total


def attended_pairs(length: int, window: int | None) -> float:
    """Returns: pairs of tokens of a row of which the later one looks at the earlier one, by the causal mask."""
    if window is None or window >= length:
        return length * length / 2
    return window * length - window * window / 2


def model_flops(module: Any) -> ModelFlops | None:
    """Counts the operations of a transformers model, sharded or not.

    Tables that are only looked up cost nothing; of a mixture of experts those that a token is routed to count.

    Returns: None for a model whose layers cannot be told from its config.
    """
    config = module.config.get_text_config()
    share = _expert_share(config)
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    looked_up = None if head is not None and head.weight is embedding.weight else embedding.weight
    per_token = 0.0
    for name, parameter in module.named_parameters():
        if parameter is looked_up:
            continue
        routed = ".experts." in name
        if routed and share is None:
            return None
        per_token += whole_numel(parameter) * (6 if parameter.requires_grad else 4) * (share if routed else 1.0)
    attention = _attention_layers(config)
    return None if attention is None else ModelFlops(per_token, attention)


def _expert_share(config: Any) -> float | None:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    total = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    return chosen / total if chosen and total else None


def _attention_layers(config: Any) -> tuple[tuple[float, int | None, int], ...] | None:
    heads, layers = getattr(config, "num_attention_heads", None), getattr(config, "num_hidden_layers", None)
    if not heads or not layers:
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size / heads
    if getattr(config, "v_head_dim", None) and getattr(config, "qk_head_dim", None):
        # Multi-head latent attention: queries and values are of different sizes.
        size = (config.qk_head_dim + config.v_head_dim) / 2
    window = getattr(config, "sliding_window", None) or None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return ((heads * size, window, layers),)
    found = Counter(kinds)
    if found.keys() - {"full_attention", "sliding_attention"}:
        # Linear attention and state-space layers have operations of their own.
        return None
    return tuple(
        (heads * size, window if kind == "sliding_attention" else None, count) for kind, count in found.items()
    )
