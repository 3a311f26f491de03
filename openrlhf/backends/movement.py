"""Whether every trainable weight really moves: a model may train with a falling loss and most of its weights frozen."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from openrlhf.backends.base import StepResult
from openrlhf.backends.fragments import own_fragment
from openrlhf.models.adapters import waits_for_other

# A float32 near 1 stands still under a smaller step: norms of a model would be blamed for a learning rate that is only
# warming up.
SURE_LR = 2.0**-23
NAMED = 5

ZERO_GRADIENT = (
    "the gradient of an optimizer step is 0 for every weight; in RL that is so where the samples of each group have "
    "equal rewards, and nothing was learned from them"
)


def fingerprints(module: Any, device: torch.device) -> dict[str, tuple[float, float]]:
    """Two sums over each trainable parameter's full-precision copy, over all ranks; collective. Of an adapter only the
    matrix that the first gradient reaches: the other one's follows from where it has moved.

    Half-precision weights would not do: a small learning rate moves the copy long before it moves them.
    """
    trainable = [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and not waits_for_other(name)
    ]
    sums = torch.zeros(len(trainable), 2, dtype=torch.float64, device=device)
    for index, (_, parameter) in enumerate(trainable):
        fragment = own_fragment(parameter)
        if fragment is not None:
            values = fragment.values.to(device)
            sums[index, 0] = values.sum(dtype=torch.float64)
            sums[index, 1] = values[::2].sum(dtype=torch.float64)
    dist.all_reduce(sums)
    return {name: (first, second) for (name, _), (first, second) in zip(trainable, sums.tolist(), strict=True)}


class MovementWatch:
    """Remembers where the trainable weights of a model stand, and finds those that stay there.

    It reads every weight twice: once when it is made and once when it answers, which is far less than a training step.
    Weight decay moves a weight as well, one without any gradient too.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        """Collective."""
        self._module = module
        self._device = device
        self._start = fingerprints(module, device)
        self._last_lr = 0.0
        self._answered = False
        self._zero_told = False

    def unmoved(self) -> list[str]:
        """Names of the trainable parameters that stand where they stood; collective."""
        now = fingerprints(self._module, self._device)
        return [name for name, sums in now.items() if sums == self._start[name]]

    def warning(self, step: StepResult) -> str | None:
        """To be called after each optimizer step, on all ranks.

        It looks once: after the first step whose learning rate was large enough to move any weight, or no longer rose.

        Returns: a sentence that names weights which did not move, or, once, that there was no gradient at all; None at
            all other times.
        """
        lr = step.lowest_lr
        if self._answered or step.skipped or lr <= 0:
            return None
        if step.grad_norm == 0:
            # Nothing has to move then, so this step judges no weight.
            told, self._zero_told = self._zero_told, True
            return None if told else ZERO_GRADIENT
        rising, self._last_lr = lr > self._last_lr, lr
        if lr < SURE_LR and rising:
            return None
        self._answered = True
        names = self.unmoved()
        if not names:
            return None
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return (
            f"{len(names)} of {len(self._start)} trainable weights have not moved, at a learning rate of {lr:g}: "
            f"{', '.join(names[:NAMED])}{more}; no gradient reaches them (experts that no token was routed to, for "
            "instance), or the learning rate is too small for them"
        )
