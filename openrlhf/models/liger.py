"""Liger's Triton kernels for norms, rotary embeddings and gated MLPs inside of a loaded model."""

from __future__ import annotations

from typing import Any

from openrlhf.config.errors import ConfigError


def apply_liger(model: Any) -> None:
    """Patches a transformers model; its weights and what it computes stay the same, up to rounding.

    Not Liger's losses: the log-probs here are computed inside of the output head already, by chunks of tokens.

    Raises: ConfigError where Liger is not installed or has no kernels for this kind of model.
    """
    try:
        from liger_kernel.transformers.monkey_patch import (
            MODEL_TYPE_TO_APPLY_LIGER_FN,
            _apply_liger_kernel_to_instance,
        )
    except ImportError as error:
        raise ConfigError(
            f"--ds.use_liger_kernel: liger-kernel cannot be imported ({error}); pip install 'openrlhf[liger]', or "
            "leave the flag out"
        ) from error
    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"--ds.use_liger_kernel: Liger has no kernels for a {kind}; leave the flag out")
    _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)
