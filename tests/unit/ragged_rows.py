"""Random rows of different length for the tests of the maths."""

import random

import torch

SEEDS = range(6)


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def bools(values):
    return torch.tensor(values, dtype=torch.bool)


def ragged(seed):
    """Rows of random length, some without a trained token; returns (lengths, mask rows, cu_seqlens, flat mask)."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 12) for _ in range(rng.randint(4, 14))]
    rows = [[False] + [rng.random() < 0.7 for _ in range(n - 1)] for n in lengths]
    rows[1] = [False] * lengths[1]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    return lengths, rows, cu, torch.tensor([m for row in rows for m in row])


def randn(total, seed, scale=1.0):
    return torch.randn(total, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def per_row(flat, lengths):
    return [part.tolist() for part in flat.split(lengths)]
