"""Muon for the matrices of hidden layers and AdamW for all else, on weights that ZeRO may have cut into flat parts.

DeepSpeed's own Muon is not used: it ignores the number of Newton-Schulz steps and Nesterov, and it clips by the norm of
what was orthogonalised already, which does not depend on the gradient. Here DeepSpeed sees an ordinary optimizer: the
gradient is clipped as it is, and an update is orthogonalised as part of the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from openrlhf.backends.fragments import true_shape
from openrlhf.backends.muon_exchange import Matrix, matrices_of, orthogonalized_parts

# Keller Jordan's quintic, as in torch.optim.Muon (https://kellerjordan.github.io/posts/muon/).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7

# The key that tells the two kinds of parameter groups apart.
MUON = "muon"


def orthogonalize(matrix: torch.Tensor, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """Pushes all singular values of a matrix towards 1 by Newton-Schulz iterations.

    Args:
        matrix: [..., rows, columns]; a stack of matrices (experts) is treated one by one.
        steps: iterations.
        dtype: what they compute in. In bfloat16 the result is that of torch.optim.Muon, bit for bit.

    Returns: [..., rows, columns] in ``dtype``; 0 where the matrix is 0.
    """
    if matrix.dim() > 2:
        return torch.stack([orthogonalize(one, steps, dtype) for one in matrix])
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(dtype).T if tall else matrix.to(dtype)
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def muon_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns: the trainable matrices of hidden layers, those of LoRA and stacks of experts among them.

    Not embeddings, the output head, convolutions, or what has one row or column (the scalar heads of critics and reward
    models): AdamW moves those.
    """
    others = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.modules.conv._ConvNd))
        for parameter in module.parameters(recurse=False)
    }
    for head in (model.get_input_embeddings(), model.get_output_embeddings()):
        others |= {id(parameter) for parameter in head.parameters()} if head is not None else set()

    def is_matrix(name: str, parameter: nn.Parameter) -> bool:
        shape = true_shape(parameter)
        # peft keeps the adapters of an embedding apart from it.
        return len(shape) in (2, 3) and min(shape[-2:]) > 1 and "lora_embedding" not in name

    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in others and is_matrix(name, parameter)
    ]


def rates_of(groups: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Args: groups: an optimizer's, of any kind. Returns: ``lr`` and, beside Muon, ``adam_lr``."""
    adam = [float(group["lr"]) for group in groups if not group.get(MUON, False)]
    muon = [float(group["lr"]) for group in groups if group.get(MUON, False)]
    rates = {"lr": (muon or adam)[0]}
    return {**rates, "adam_lr": adam[0]} if muon and adam else rates


class MuonWithAdamW(torch.optim.Optimizer):
    """Both optimizers as one, so that ZeRO, schedules and checkpoints see a single list of groups; Muon's come first.

    Update of a matrix W with gradient g, as in torch.optim.Muon: m <- lerp(m, g, 1 - momentum);
    u = lerp(g, m, momentum) with Nesterov, else m; W <- (1 - lr * weight_decay) W - lr * sqrt(max(1, rows / columns)) *
    orthogonalize(u).

    Args:
        matrices: parameters for Muon, at least one.
        adamw: moves all other parameters; None where there are none.
        muon: ``MuonConfig`` (lr, momentum, ns_steps, nesterov).
        weight_decay: of the matrices.
        compute: number format of the Newton-Schulz iterations.
        device: where they run, also where the optimizer's state stays in host memory.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        adamw: torch.optim.AdamW | None,
        *,
        muon: Any,
        weight_decay: float,
        compute: torch.dtype,
        device: torch.device,
    ) -> None:
        self._adamw = adamw
        self._compute = compute
        self._device = device
        # By the flat tensor that ZeRO put in the place of parameters.
        self._matrices: dict[torch.Tensor, list[Matrix]] = {}
        group = {
            "params": list(matrices),
            MUON: True,
            "lr": muon.lr,
            "momentum": muon.momentum,
            "ns_steps": muon.ns_steps,
            "nesterov": muon.nesterov,
            "weight_decay": weight_decay,
        }
        others = [] if adamw is None else [{**group, MUON: False} for group in adamw.param_groups]
        super().__init__([group, *others], {})

    def attach(self, engine: Any) -> None:
        """Learns where ZeRO has put which part of each matrix; collective.

        Args:
            engine: DeepSpeed's, made with this optimizer.
        """
        self._matrices = matrices_of(engine, [group[MUON] for group in self.param_groups])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Moves the parameters that have a gradient; collective over the ranks, which hold parts of one matrix."""
        if self._adamw is not None:
            # Loading a state replaces both, and DeepSpeed steps group by group.
            self._adamw.state = self.state
            self._adamw.param_groups = [group for group in self.param_groups if not group[MUON]]
            self._adamw.step()
        for group in self.param_groups:
            for parameter in group["params"] if group[MUON] else []:
                if parameter.grad is not None:
                    self._move(parameter, group)

    def _move(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient, momentum = parameter.grad, state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        if parameter.dim() > 1:
            whole = orthogonalize(update, group["ns_steps"], self._compute)
            parameter.add_(whole, alpha=-group["lr"] * _scale(parameter.shape))
            return
        matrices = self._matrices[parameter]
        parts = orthogonalized_parts(
            matrices,
            update,
            lambda whole: orthogonalize(whole, group["ns_steps"], self._compute),
            compute=self._compute,
            device=self._device,
        )
        for matrix, part in parts:
            piece = parameter.narrow(0, matrix.offset, part.numel())
            piece.add_(part.to(piece.device, piece.dtype), alpha=-group["lr"] * _scale(matrix.shape))


def _scale(shape: Sequence[int]) -> float:
    """Tall matrices take longer steps, so that the update of an output is as large whatever the shape is."""
    return math.sqrt(max(1.0, shape[-2] / shape[-1]))
