"""From rewards at tokens to returns and advantages at tokens."""

from __future__ import annotations

import torch

from openrlhf.algorithms.aggregate import mask_out, row_of_token

VARIANCE_FLOOR = 1e-8


def reward_to_go(rewards: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor, gamma: float) -> torch.Tensor:
    """Discounted sum of the rewards from each trained token to the end of its row.

    Tokens that the policy did not produce are passed over: they add nothing, discount nothing and end nothing, so that
    the answer before a tool's output gets the reward that comes after it.

    Args:
        rewards: [T], per token.
        mask: bool [T].
        cu_seqlens: [N + 1].
        gamma: discount per trained token.

    Returns: [T], 0 where ``mask`` is False.
    """
    mask = mask.bool()
    row = row_of_token(cu_seqlens)
    trained_row = row[mask]
    counts = torch.bincount(trained_row, minlength=cu_seqlens.numel() - 1)
    starts = counts.cumsum(0) - counts
    place = torch.arange(trained_row.numel(), device=mask.device) - starts[trained_row]
    # Rows with the trained tokens alone, so that one pass from the right serves all rows at once.
    width = int(counts.max()) if counts.numel() else 0
    grid = rewards.new_zeros(width, counts.numel())
    grid[place, trained_row] = rewards[mask]
    for t in range(width - 2, -1, -1):
        grid[t] += gamma * grid[t + 1]
    returns = torch.zeros_like(rewards)
    returns[mask] = grid[place, trained_row]
    return returns


def terminal_rewards(scalars: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Puts one number a row on the last trained token of the row.

    Args:
        scalars: [N].
        mask: bool [T].
        cu_seqlens: [N + 1].

    Returns: [T], 0 elsewhere; a row without a trained token has no place for its number.
    """
    mask = mask.bool()
    row = row_of_token(cu_seqlens)
    position = torch.arange(mask.numel(), device=mask.device)
    last = torch.full((scalars.numel(),), -1, device=mask.device)
    last = last.scatter_reduce(0, row[mask], position[mask], "amax")
    rewards = scalars.new_zeros(mask.numel())
    rewards[last[last >= 0]] = scalars[last >= 0]
    return rewards


def whiten(values: torch.Tensor, mask: torch.Tensor, std: bool = True) -> torch.Tensor:
    """Shifts to mean 0 over all trained tokens and, with ``std``, scales to variance 1 (biased, floor 1e-8).

    Source: REINFORCE++, arXiv 2501.03262.

    Args:
        values: [T].
        mask: bool [T].

    Returns: [T], 0 where ``mask`` is False.
    """
    mask = mask.bool()
    if not bool(mask.any()):
        return torch.zeros_like(values)
    trained = values[mask]
    centred = trained - trained.mean()
    if std:
        centred = centred * centred.square().mean().clamp(min=VARIANCE_FLOOR).rsqrt()
    white = torch.zeros_like(values)
    white[mask] = centred
    return white


def generalized_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    gamma: float,
    lambd: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE (arXiv 1506.02438, eq. 16) over the tokens that the policy produced.

    delta_t = r_t + gamma V_next - V_t and A_t = delta_t + gamma lambda A_next, where the next token is the next one of
    the row with ``mask`` True; after the last one both are 0. The tokens between two turns of the policy add nothing
    and discount nothing.

    Args:
        rewards: [T], per token.
        values: [T], of the state before each token: the critic's output at the token before it.
        mask: bool [T]; nothing that stands where it is False has an effect.
        cu_seqlens: [N + 1].
        gamma: discount per trained token.
        lambd: lambda, from 0 (one step) to 1 (the whole return).

    Returns:
        advantages [T] and returns A + V [T], neither whitened, 0 where ``mask`` is False.
    """
    mask = mask.bool()
    trained_row, trained_values = row_of_token(cu_seqlens)[mask], values[mask]
    following = torch.zeros_like(trained_values)
    if trained_row.numel() > 1:
        same_row = trained_row[1:] == trained_row[:-1]
        # A selection and no product: a NaN in one row must not reach the row before it.
        following[:-1] = mask_out(trained_values[1:], same_row)
    deltas = torch.zeros_like(values)
    deltas[mask] = rewards.to(values.dtype)[mask] + gamma * following - trained_values
    advantages = reward_to_go(deltas, mask, cu_seqlens, gamma * lambd)
    return advantages, mask_out(advantages + values, mask)
