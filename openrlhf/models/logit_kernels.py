"""What the output head needs of its logits, in one pass over them each way: kernels in Triton, for GPUs.

PyTorch's softmax reads the logits three times and writes them as float32, over which an entropy goes five times more.
Here they are read once in the forward (the online softmax of Milakov and Gimelshein, https://arxiv.org/abs/1805.02867,
with the entropy's sum carried along), and read and written once in the backward.
"""

from __future__ import annotations

import logging
from functools import lru_cache

import torch
import torch.distributed as dist
import triton
import triton.language as tl

logger = logging.getLogger(__name__)

# Logits of a row that one program holds at a time.
BLOCK = 4096
WARPS = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _statistics(logits, targets, logprobs, entropies, normalisers, stride, vocab, temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    none: tl.constexpr = float("-inf")
    peak, total, spread = none, 0.0, 0.0
    for start in range(0, vocab, BLOCK):
        place = start + tl.arange(0, BLOCK)
        scaled = tl.load(logits + place, mask=place < vocab, other=none).to(tl.float32) / temperature
        higher = tl.maximum(peak, tl.max(scaled, 0))
        # Where all are banned so far there is no peak to measure from.
        base = tl.where(higher == none, 0.0, higher)
        below = scaled - base
        share = tl.exp(below)
        shrink = tl.exp(peak - base)
        # A banned token has the share 0 at minus infinity, and adds nothing.
        spread = tl.where(shrink > 0, shrink * (spread + total * (peak - base)), 0.0)
        spread += tl.sum(tl.where(share > 0, share * below, 0.0), 0)
        total = total * shrink + tl.sum(share, 0)
        peak = higher
    target = tl.load(logits + tl.load(targets + row)).to(tl.float32) / temperature
    width = tl.log(total)
    tl.store(logprobs + row, target - peak - width)
    tl.store(entropies + row, width - spread / total)
    tl.store(normalisers + row, peak + width)


@triton.jit
def _gradient(
    logits,
    targets,
    normalisers,
    upstream,
    entropy_upstream,
    entropies,
    stride,
    vocab,
    temperature,
    SPREAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < vocab
    logits += row * stride + place
    scaled = tl.load(logits, mask=inside, other=0.0).to(tl.float32) / temperature
    log_share = scaled - tl.load(normalisers + row)
    share = tl.exp(log_share)
    scale = tl.load(upstream + row)
    grad = tl.where(place == tl.load(targets + row), scale, 0.0) - scale * share
    if SPREAD:
        weight, entropy = tl.load(entropy_upstream + row), tl.load(entropies + row)
        grad -= tl.where(share > 0, weight * share * (log_share + entropy), 0.0)
    tl.store(logits, grad.to(logits.dtype.element_ty), mask=inside)


def row_statistics(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits [n, V], n at least 1, targets int64 [n] -> float32 [n] each: the log-prob of the target, the entropy in
    nats, and the logarithm of the sum of exponentials, all of logits / ``temperature``.
    """
    logprobs, entropies, normalisers = logits.new_empty(3, logits.shape[0], dtype=torch.float32)
    rows = logits.shape[0]
    # Triton launches on the current device.
    with torch.cuda.device_of(logits):
        _statistics[(rows,)](
            *(logits, targets.contiguous(), logprobs, entropies, normalisers),
            *(logits.stride(0), logits.shape[1], float(temperature)),
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return logprobs, entropies, normalisers


def logits_to_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    normalisers: torch.Tensor,
    upstream: torch.Tensor,
    spread: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Turns logits [n, V] into their gradient, in place, with z = logits / ``temperature``: d(log p_target) / dz_j =
    [j = target] - p_j, and d(entropy) / dz_j = -p_j (log p_j + entropy).

    Args:
        normalisers: [n], from ``row_statistics``.
        upstream: [n], the gradient of the log-probs over the temperature.
        spread: [n] twice, the gradient of the entropies over the temperature, and the entropies; None without them.
    """
    weights, entropies = (upstream, upstream) if spread is None else spread
    rows = (part.contiguous() for part in (targets, normalisers, upstream, weights, entropies))
    with torch.cuda.device_of(logits):
        _gradient[(logits.shape[0], triton.cdiv(logits.shape[1], BLOCK))](
            *(logits, *rows),
            *(logits.stride(0), logits.shape[1], float(temperature)),
            SPREAD=spread is not None,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


@lru_cache(maxsize=8)
def compiles(device: torch.device) -> bool:
    """Whether the kernels can be made there, which takes a C compiler and Python's headers; says so where not."""
    try:
        row_statistics(torch.zeros(1, 8, device=device), torch.zeros(1, dtype=torch.int64, device=device), 1.0)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        # The GPU's own trouble, of which another softmax would die as well.
        raise
    except Exception as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.warning(
                "Triton cannot compile here (%s), so that log-probs take PyTorch's softmax, which is slower: install "
                "gcc and Python's headers (python3-dev)",
                reason,
            )
        return False
    return True
