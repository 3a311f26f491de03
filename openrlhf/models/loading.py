"""Loads what transformers saved: models ready for packed rows, and tokenizers with a pad token."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from openrlhf.config.errors import ConfigError
from openrlhf.models.attention import choose_attention

logger = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@contextmanager
def _parameters_born_sharded(zero3: dict[str, Any] | None) -> Iterator[None]:
    """While it lasts, ``from_pretrained`` splits every parameter over the ranks as it is made, so that no rank ever
    holds the whole model. Only while it lasts: later models of the process may be of another kind.
    """
    if zero3 is None:
        yield
        return
    from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

    keep_alive = HfDeepSpeedConfig(zero3)
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del keep_alive


def _restore_buffers(model: PreTrainedModel, config: Any, dtype: torch.dtype, trust_remote_code: bool) -> None:
    """Puts back what sharding at birth rounded.

    DeepSpeed gives every tensor that is made under it the parameters' dtype. Rotary frequencies in bf16 are off by up
    to 0.4 %: at position 1,000 an angle is off by radians, and the model no longer is the one that the engine runs.
    """
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    saved = set(skeleton.state_dict())
    for name, true in skeleton.named_buffers():
        owner, _, leaf = name.rpartition(".")
        rounded = model.get_submodule(owner)._buffers[leaf]
        if name not in saved:
            model.get_submodule(owner)._buffers[leaf] = true.to(rounded.device)
        elif rounded.dtype != true.dtype:
            logger.warning("%s was rounded to %s by ZeRO-3 while it was loaded", name, rounded.dtype)


def _without_dropout(model: nn.Module) -> None:
    """Training mode must give the log-probs of evaluation mode, or the first ratio of an update is not 1."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def load_causal_lm(
    path: str | Path,
    *,
    dtype: torch.dtype,
    attn_implementation: str = "auto",
    device: torch.device | str,
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
    gradient_checkpointing_reentrant: bool = False,
    experts_implementation: str | None = None,
    zero3: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """Loads a causal language model, dropout off.

    Args:
        path: folder or hub name.
        attn_implementation: ``--ds.attn_implementation``; "auto" takes the best that is installed.
        experts_implementation: ``--ds.experts_implementation``; None leaves it to transformers.
        zero3: the DeepSpeed config where parameters are to be sharded at birth; they then stand on the device that
            DeepSpeed chose.

    Raises:
        ConfigError: there is no such model, or the attention kernel cannot run here.
    """
    device = torch.device(device)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except OSError as error:
        raise ConfigError(f"no model can be loaded from {path}: {str(error).splitlines()[0]}") from error
    model_class = _model_class(config, path, trust_remote_code)
    implementation = choose_attention(config, model_class, attn_implementation, device)
    with _parameters_born_sharded(zero3):
        model = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=implementation,
            trust_remote_code=trust_remote_code,
            **({} if experts_implementation is None else {"experts_implementation": experts_implementation}),
        )
    if zero3 is not None:
        _restore_buffers(model, config, dtype, trust_remote_code)
    _without_dropout(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": gradient_checkpointing_reentrant})
        if gradient_checkpointing_reentrant:
            # The reentrant kind gives no gradient at all where none of its inputs has one.
            model.enable_input_require_grads()
    return model if zero3 is not None else model.to(device)


def _model_class(config: Any, path: str | Path, trust_remote_code: bool) -> type[PreTrainedModel]:
    """The class that will be made, to be asked which attention it can run."""
    own_code = getattr(config, "auto_map", None) or {}
    if trust_remote_code and "AutoModelForCausalLM" in own_code:
        return get_class_from_dynamic_module(own_code["AutoModelForCausalLM"], str(path))
    mapping = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise ConfigError(
            f"{path} holds a {config.model_type}, which transformers cannot run as a causal language model"
        )
    return mapping[type(config)]


def load_tokenizer(
    path: str | Path,
    *,
    use_fast: bool = True,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
) -> PreTrainedTokenizerBase:
    """Loads a tokenizer and sees to it that it has a pad token.

    Args:
        chat_template: takes the place of the tokenizer's own.
    """
    tokenizer = AutoTokenizer.from_pretrained(path, use_fast=use_fast, trust_remote_code=trust_remote_code)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = _spare_token(tokenizer)
        logger.warning("the tokenizer of %s has no pad token; %r is used", path, tokenizer.pad_token)
    return tokenizer


def _spare_token(tokenizer: PreTrainedTokenizerBase) -> str:
    """A token that stands in no text: a reserved one, else the unknown token, else EOS."""
    vocabulary = tokenizer.get_vocab()
    spare = sorted(
        (
            token
            for token in vocabulary
            if any(word in token for word in ("<|pad", "_pad_", "<pad>", "reserved_special"))
        ),
        key=vocabulary.__getitem__,
    )
    candidates = [*spare, tokenizer.unk_token, tokenizer.eos_token]
    return next(token for token in candidates if token is not None)
