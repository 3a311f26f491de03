"""Rows of different length for the tests of the maths: strategies, and what turns them into tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import settings
from hypothesis import strategies as st

# No clip or bound of the maths is a multiple of it, so that no drawn value lies on the very edge of a rule.
STEP = 0.0037


def checked(max_examples: int) -> settings:
    """So many examples, the same in every run, however long one takes."""
    return settings(max_examples=max_examples, deadline=None, derandomize=True)


class Ragged(NamedTuple):
    """A batch: tokens of each row, masks row by row, row bounds [N + 1], and the mask flat [T]."""

    lengths: list[int]
    rows: list[list[bool]]
    cu_seqlens: torch.Tensor
    mask: torch.Tensor


@st.composite
def ragged(draw: st.DrawFn, max_rows: int = 6, max_length: int = 8) -> Ragged:
    """Rows of any length, of which some train nothing but not all; the first token of a row is never trained."""
    tails = draw(st.lists(st.lists(st.booleans(), max_size=max_length - 1), min_size=1, max_size=max_rows))
    rows = [[False, *tail] for tail in tails]
    if not any(map(any, rows)):
        rows.append([False, True])
    return laid_out(rows)


def laid_out(rows: list[list[bool]]) -> Ragged:
    """A batch from the masks of its rows."""
    lengths = [len(row) for row in rows]
    return Ragged(lengths, rows, torch.tensor([0, *lengths]).cumsum(0), torch.tensor([m for row in rows for m in row]))


def numbers(count: int, bound: float = 2.0) -> st.SearchStrategy[torch.Tensor]:
    """Float64 [count] between -bound and bound."""
    limit = int(bound / STEP)
    return st.lists(st.integers(-limit, limit), min_size=count, max_size=count).map(lambda ks: f64(ks) * STEP)


def of_each(count: int, strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """Lists of ``count`` draws."""
    return st.lists(strategy, min_size=count, max_size=count)


def f64(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def bools(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


def randn(total: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(total, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def per_row(flat: torch.Tensor, lengths: Sequence[int]) -> list[list[float]]:
    return [part.tolist() for part in flat.split(list(lengths))]
