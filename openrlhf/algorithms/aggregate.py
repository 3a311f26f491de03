"""From a loss per token to one number, with a denominator that is counted over the whole optimizer step."""

from __future__ import annotations

from typing import Literal, get_args

import torch

Aggregation = Literal["token_mean", "seq_mean", "constant"]


def mask_out(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Zeroes whatever stands where nothing is trained, before any arithmetic sees it.

    A multiplication by the mask would not do: NaN times 0 is NaN, in the value and in the gradient.

    Args:
        values: [T], any float type; anything, NaN too, where ``mask`` is False.
        mask: bool [T].

    Returns: [T], 0 where ``mask`` is False, with a zero gradient there.
    """
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def row_of_token(cu_seqlens: torch.Tensor, tokens: int | None = None) -> torch.Tensor:
    """Returns: int64 [T], the row that each token stands in.

    Args:
        cu_seqlens: [N + 1].
        tokens: T where it is known, so that an accelerator need not be waited for to count it.
    """
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    rows = torch.arange(lengths.numel(), device=cu_seqlens.device)
    return torch.repeat_interleave(rows, lengths, output_size=tokens)


def sum_by_row(values: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Returns: [N], the sum of ``values`` [T] over each row."""
    sums = torch.zeros(cu_seqlens.numel() - 1, dtype=values.dtype, device=values.device)
    return sums.index_add(0, row_of_token(cu_seqlens, values.numel()), values)


def count_tokens(mask: torch.Tensor) -> torch.Tensor:
    """Returns: int64 scalar, trained tokens of ``mask`` [T]."""
    return mask.bool().sum()


def count_nonempty(mask: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Returns: int64 scalar, rows of ``cu_seqlens`` [N + 1] with at least one trained token in ``mask`` [T]."""
    return (sum_by_row(mask.long(), cu_seqlens) > 0).sum()


def count_units(mask: torch.Tensor, cu_seqlens: torch.Tensor, mode: Aggregation, pad_rows: int = 0) -> torch.Tensor:
    """Counts what ``mode`` divides by in this share; summed over ranks and micro-batches it is the denominator.

    Args:
        mask: bool [T].
        cu_seqlens: [N + 1], bounds of trajectories.
        mode: see ``aggregate``.
        pad_rows: trailing rows that are no trajectories.

    Returns: int64 scalar: trained tokens ("token_mean"), non-empty trajectories ("seq_mean") or trajectories
        ("constant").
    """
    _check_mode(mode)
    if mode == "token_mean":
        return count_tokens(mask)
    if mode == "seq_mean":
        return count_nonempty(mask, cu_seqlens)
    return torch.tensor(cu_seqlens.numel() - 1 - pad_rows, device=mask.device)


def aggregate(
    loss: torch.Tensor,
    mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    mode: Aggregation,
    denominator: float | torch.Tensor,
    constant: float = 1.0,
    row_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """This share's part of the loss of an optimizer step; the sum over all ranks and micro-batches is the loss.

    - ``token_mean``: sum of the masked losses / trained tokens of the step (DAPO, arXiv 2503.14476).
    - ``seq_mean``: the mean of each trajectory, summed / non-empty trajectories of the step (GRPO, arXiv 2402.03300).
    - ``constant``: sum of the masked losses / (trajectories * constant) (Dr. GRPO, arXiv 2503.20783).

    Args:
        loss: [T], per token; whatever stands where ``mask`` is False, NaN too, has no effect on value or gradient.
        mask: bool [T].
        cu_seqlens: [N + 1].
        mode: how to aggregate.
        denominator: ``count_units`` summed over the whole step, over all ranks and micro-batches; a number rather than
            a tensor, so that an accelerator need not be waited for.
        constant: tokens that ``constant`` counts for each trajectory; 1 where ``denominator`` has it in it already.
        row_tokens: [N], for "seq_mean", trained tokens of the trajectory that a row belongs to, where a trajectory has
            several rows or these stand in several micro-batches; the row's own where None.

    Returns: scalar; a finite 0 with a gradient path where nothing is trained.

    Raises:
        ValueError: for an unknown ``mode``, a ``constant`` that is not above 0, or trained tokens over a denominator
            of 0.
    """
    _check_mode(mode)
    if not constant > 0:
        raise ValueError(f"the constant of the loss aggregation must be above 0, got {constant}")
    masked = mask_out(loss, mask)
    if not denominator > 0:
        if bool(mask.any()):
            raise ValueError(f"{mode} over a denominator of {float(denominator)}, yet there are trained tokens")
        return masked.sum()
    if mode == "seq_mean":
        tokens = sum_by_row(mask.long(), cu_seqlens) if row_tokens is None else row_tokens
        masked = masked / tokens.clamp(min=1).to(masked.dtype)[row_of_token(cu_seqlens, masked.numel())]
    total = masked.sum() / denominator
    return total / constant if mode == "constant" else total


def _check_mode(mode: str) -> None:
    if mode not in get_args(Aggregation):
        raise ValueError(f"unknown loss aggregation {mode!r}; there are {', '.join(get_args(Aggregation))}")
