"""The losses of a reward model: of two scores the preferred one shall be the higher one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F


def sigmoid_loss(advantage: torch.Tensor) -> torch.Tensor:
    """-log sigmoid(x), the negative log-likelihood of Bradley and Terry's model; finite for every finite x.

    Source: L. Ouyang et al., arXiv 2203.02155, equation 1.
    """
    return -F.logsigmoid(advantage)


def logexp_loss(advantage: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(-x)): the same value in another form, without the overflow that it has written out."""
    return torch.logaddexp(torch.zeros_like(advantage), -advantage)


PAIRWISE_LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"sigmoid": sigmoid_loss, "logexp": logexp_loss}


def pairwise_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor | None = None, *, kind: str = "sigmoid"
) -> torch.Tensor:
    """Loss of pairs of scores, computed in float32 or wider.

    Args:
        chosen: [K], scores of the preferred responses.
        rejected: [K], of the others.
        margin: [K], by how much the first shall win (H. Touvron et al., arXiv 2307.09288, equation 2); None for 0.
        kind: a key of ``PAIRWISE_LOSSES``.

    Returns: [K], to be averaged over all pairs of an optimizer step.

    Raises:
        ValueError: for an unknown ``kind``.
    """
    if kind not in PAIRWISE_LOSSES:
        raise ValueError(f"the loss of a reward model is one of {', '.join(PAIRWISE_LOSSES)}, got {kind!r}")
    wide = torch.promote_types(chosen.dtype, torch.float32)
    advantage = chosen.to(wide) - rejected.to(wide)
    if margin is not None:
        advantage = advantage - margin.to(wide)
    return PAIRWISE_LOSSES[kind](advantage)
