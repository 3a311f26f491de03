"""An exponential moving average of a model's weights, beside the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from openrlhf.backends.fragments import own_fragment, true_shape
from openrlhf.config.errors import ConfigError


class MovingAverage:
    """average <- beta * average + (1 - beta) * weights, of the trainable weights in full precision.

    It starts at the weights that the model has when this is made. Each rank keeps its part in host memory, so that on a
    GPU it takes nothing from training.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts: dict[str, tuple[int, torch.Tensor]] = {}
        for name, parameter in self._trainable():
            if (fragment := own_fragment(parameter)) is not None:
                self._parts[name] = (fragment.start, fragment.values.to("cpu", torch.float32, copy=True))

    def _trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, parameter in self._module.named_parameters() if parameter.requires_grad)

    def update(self, beta: float) -> None:
        """Takes the present weights in.

        Args:
            beta: the share of the average that stays, in [0, 1).
        """
        for name, parameter in self._trainable():
            fragment = own_fragment(parameter)
            if fragment is not None:
                self._parts[name][1].mul_(beta).add_(fragment.values.to("cpu", torch.float32), alpha=1 - beta)

    def whole(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields: names and whole averages, float32 on ``device``, one at a time. Collective: consume all, in order."""
        for name, parameter in self._trainable():
            shape = true_shape(parameter)
            full = torch.zeros(shape.numel(), device=device)
            if name in self._parts:
                start, values = self._parts[name]
                full[start : start + values.numel()] = values.to(device)
            dist.all_reduce(full)
            yield name, full.view(shape)

    def state(self) -> dict[str, list[Any]]:
        """Returns: this rank's parts: by name, where they start and what they are."""
        return {name: [start, values] for name, (start, values) in self._parts.items()}

    def restore(self, states: Sequence[dict[str, list[Any]]], source: str) -> None:
        """Takes over what the ranks of a run, as many as there were, gave as their ``state``.

        Args:
            source: where the states come from, for the error.

        Raises: ConfigError where they do not hold all of a weight.
        """
        for name, (start, values) in self._parts.items():
            missing = values.numel()
            for state in states:
                if name not in state:
                    continue
                other_start, other = state[name]
                first = max(start, other_start)
                last = min(start + values.numel(), other_start + other.numel())
                if first < last:
                    values[first - start : last - start] = other[first - other_start : last - other_start]
                    missing -= last - first
            if missing:
                raise ConfigError(f"{source} lacks the moving average of {name}: another model has written it")
