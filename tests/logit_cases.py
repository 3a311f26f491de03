"""What the kernels for logits answer, beside plain float64. For a process of its own: Triton reads TRITON_INTERPRET,
without which it wants a GPU, once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from openrlhf.models import logit_kernels, logprobs
from openrlhf.models.logprobs import ScoreRequest, logprobs_from_hidden

ROWS, HIDDEN = 6, 16
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-11, torch.float32: 2**-24}


def scored_logits(
    vocab: int, dtype: torch.dtype, temperature: float, entropy: bool, banned: bool, device: str = "cpu"
) -> dict[str, float]:
    """Random logits, with ``banned`` all but the first few of some rows at minus infinity.

    Returns: largest distances to float64; for gradients, what is beyond the rounding of the dtype. The interpreter cuts
    bf16 off where a GPU rounds to the nearest.
    """
    generator = torch.Generator().manual_seed(vocab)
    logits = (6 * torch.randn(ROWS, vocab, generator=generator)).to(dtype)
    targets = torch.randint(min(3, vocab), (ROWS,), generator=generator)
    if banned:
        logits[::2, 3:] = -torch.inf
        logits[1, : vocab - 3], targets[1] = -torch.inf, vocab - 1
    logits, targets = logits.to(device), targets.to(device)
    plain = (logits.double() / temperature).log_softmax(-1)
    shares = plain.exp()
    entropies = torch.special.entr(shares).sum(-1)
    upstream, weights = torch.linspace(-1, 2, ROWS, device=device), torch.linspace(1, -1, ROWS, device=device)
    wanted = upstream[:, None] * (nn.functional.one_hot(targets, vocab) - shares)
    if entropy:
        wanted -= weights[:, None] * torch.where(shares > 0, shares * (plain + entropies[:, None]), 0.0)
    found = logit_kernels.row_statistics(logits, targets, temperature)
    spread = (weights, found[1]) if entropy else None
    logit_kernels.logits_to_gradient(logits, targets, temperature, found[2], upstream, spread)
    return {
        "logprobs": float((found[0] - plain.gather(-1, targets[:, None])[:, 0]).abs().max()),
        "entropies": float((found[1] - entropies).abs().max()),
        "gradient": float(((logits.double() - wanted).abs() - ROUNDING[dtype] * wanted.abs()).max()),
    }


def head_answers(chunk_rows: int, entropy: bool, device: str = "cpu") -> dict[str, list[Any]]:
    """Log-probs, entropies and gradients of a whole output head of 5,000 tokens, by kernels and by PyTorch."""
    vocab = 5000
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(rows, HIDDEN, generator=generator).to(device) for rows in (ROWS, vocab)]
    targets = torch.randint(vocab, (ROWS,), generator=generator).to(device)
    request = ScoreRequest(
        positions=torch.arange(ROWS, device=device),
        targets=targets,
        temperature=0.7,
        entropy=entropy,
        chunk_elements=chunk_rows * vocab,
    )
    upstream = torch.linspace(-1, 2, ROWS, device=device)
    answers = {}
    for name, kernels in (("kernels", logit_kernels), ("plain", None)):
        logprobs._kernels = lambda hidden, chosen=kernels: chosen
        leaves = [leaf.clone().requires_grad_() for leaf in drawn]
        scored = [part for part in logprobs_from_hidden(*leaves, None, request) if part is not None]
        total = sum((part * upstream.roll(turn)).sum() for turn, part in enumerate(scored))
        grads = torch.autograd.grad(total, leaves)
        answers[name] = [part.detach().tolist() for part in (*scored, *grads)]
    return answers


def nan_answers() -> list[float]:
    """Log-prob, entropy and normaliser of a row that holds one NaN."""
    logits = torch.zeros(1, 20)
    logits[0, 7] = torch.nan
    return [float(part) for part in logit_kernels.row_statistics(logits, torch.zeros(1, dtype=torch.int64), 1.0)]
