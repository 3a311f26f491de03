"""What a model does differently while it is trained: dropout, and activations that are computed twice."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def without_dropout(model: nn.Module) -> None:
    """Turns a model's dropout off: training mode must give the log-probs of evaluation mode, or the first ratio of an
    update is not 1.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def _draws(model: nn.Module) -> bool:
    """Whether some layer has dropout left."""
    return any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules())


def checkpoint_layers(model: PreTrainedModel, reentrant: bool) -> None:
    """Lets the layers of a model recompute their activations in the backward.

    Args: ``reentrant``: PyTorch's older way of doing so.
    """
    # Nothing is drawn where dropout is off; the state of the generators would be saved and put back in each layer.
    model.gradient_checkpointing_enable({"use_reentrant": reentrant, "preserve_rng_state": _draws(model)})
    if reentrant:
        # The reentrant kind gives no gradient at all where none of its inputs has one.
        model.enable_input_require_grads()
