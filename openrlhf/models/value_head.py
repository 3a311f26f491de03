"""One scalar per token in place of logits: the head of a critic or of a reward model."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)

from openrlhf.config.errors import ConfigError

logger = logging.getLogger(__name__)

# What transformers calls the head of a decoder for sequence classification, in the model and in exported files.
EXPORTED = "score"
EXPORTED_WEIGHT = f"{EXPORTED}.weight"


@dataclass(frozen=True)
class HeadSpec:
    """Which scalar head a model is given.

    Attributes:
        prefix: ``--ds.value_head_prefix``, the name under which the model's files are searched first.
        fresh: a new head is drawn, whatever the files hold.
        seed: of a fresh head; the same on all ranks.
        pad_token_id: what the tokenizer pads with, for the exported config; None takes the model's own.
    """

    prefix: str = EXPORTED
    fresh: bool = False
    seed: int = 42
    pad_token_id: int | None = None


class ValueHead:
    """Lets a model for sequence classification answer for every token; unasked it does what it always did.

    The class's own forward keeps one token of each row, so it is of no use for a critic and for packed rows.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module
        self.plain_forward = module.forward
        self._asked: str | None = None
        module.forward = self.forward
        module.score.forward = self._score

    def _score(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head in float32: 8 bits of a sum over the hidden size would turn near scores into ties.

        Stands in the head's own forward, the one place where its weight is whole under ZeRO-3.
        """
        return nn.functional.linear(hidden.float(), self.module.score.weight.float())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns: while asked, outputs [B, S, 1] or the hidden states [B, S, H] that the head reads."""
        if self._asked is None:
            return self.plain_forward(*args, **kwargs)
        hidden = self.module.base_model(*args, **kwargs).last_hidden_state
        return hidden if self._asked == "hidden" else self.module.score(hidden)

    @contextmanager
    def answering(self, *, hidden: bool = False) -> Iterator[None]:
        """While it lasts, a forward of the model gives every token's output, or its hidden state."""
        self._asked = "hidden" if hidden else "outputs"
        try:
            yield
        finally:
            self._asked = None


def value_head(module: Any) -> ValueHead | None:
    """Returns: the head that ``attach_head`` gave this model; None for a language model."""
    owner = getattr(module.forward, "__self__", None)
    return owner if isinstance(owner, ValueHead) else None


def _read_weights(path: str | Path, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """The weights of a saved model whose names are ``wanted``; of its files only those that hold one are opened."""
    quiet = {"_raise_exceptions_for_missing_entries": False}
    for single, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        if (found := cached_file(path, single, **quiet)) is not None:
            files = [found]
        elif (found := cached_file(path, index, **quiet)) is not None:
            names = json.loads(Path(found).read_text())["weight_map"]
            files = [cached_file(path, file) for file in sorted({names[name] for name in names if wanted(name)})]
        else:
            continue
        return {name: tensor for file in files for name, tensor in _read_file(file, wanted).items()}
    return {}


def _read_file(file: str, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    if file.endswith(".safetensors"):
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys() if wanted(name)}  # noqa: SIM118
    weights = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return {name: tensor for name, tensor in weights.items() if wanted(name)}


def _candidates(prefix: str, config: PretrainedConfig) -> list[str]:
    """Names that a head may have, the likeliest first."""
    own = config.to_dict().get("value_head_prefix")
    return list(dict.fromkeys(name for name in (prefix, own, EXPORTED) if name))


def find_head(path: str | Path, config: PretrainedConfig, prefix: str) -> torch.Tensor | None:
    """Searches the files of a model for a scalar head: under ``prefix``, under what its config says
    (``value_head_prefix``), and as ``score``.

    Args:
        prefix: ``--ds.value_head_prefix``.

    Returns: its weight [1, H]; None where there is nothing under any of the names.

    Raises:
        ConfigError: what stands under the name is not a linear layer with one output and no bias.
    """
    candidates = _candidates(prefix, config)
    weights = _read_weights(path, lambda name: any(name.startswith(f"{candidate}.") for candidate in candidates))
    for candidate in candidates:
        found = {name: tensor for name, tensor in weights.items() if name.startswith(f"{candidate}.")}
        if not found:
            continue
        bias = found.pop(f"{candidate}.bias", None)
        shape = (1, config.get_text_config().hidden_size)
        shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
        if shapes != {f"{candidate}.weight": shape}:
            (name, other), *more = shapes.items() or [(f"{candidate}.bias", tuple(bias.shape))]
            raise ConfigError(
                f"--ds.value_head_prefix {candidate}: {path} holds {name} of shape {list(other)}"
                f"{f' and {len(more)} more weights' if more else ''} under this name, which is not a scalar head: one "
                f"weight of shape {list(shape)}; name the head that gives one score, or take another model"
            )
        if bias is not None and bool(bias.any()):
            raise ConfigError(
                f"--ds.value_head_prefix {candidate}: the head of {path} has a bias, which a model for sequence "
                "classification cannot hold; take it out (a constant added to every score), or take another model"
            )
        return found[f"{candidate}.weight"]
    return None


def _fresh_weight(hidden_size: int, seed: int) -> torch.Tensor:
    """Normal with standard deviation 1 / (H + 1), float32 [1, H].

    Hidden states behind a model's last norm have entries near 1, so values start at about 1 / sqrt(H): small beside a
    reward, so that the first advantages are not noise, and not 0, so that a gradient reaches the body at the first
    step. Drawn in float32 on the CPU, so that ranks, devices and dtypes agree.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, hidden_size, generator=generator) / (hidden_size + 1)


def prepare_head(path: str | Path, config: PretrainedConfig, spec: HeadSpec) -> torch.Tensor:
    """Finds or draws the head's weight and makes ``config`` that of a model with one score.

    Returns: float [1, H].

    Raises:
        ConfigError: there is no head and none was asked for, it has another shape, or the statistics are no numbers.
    """
    weight = _fresh_weight(config.get_text_config().hidden_size, spec.seed) if spec.fresh else None
    if weight is None:
        weight = find_head(path, config, spec.prefix)
    if weight is None:
        names = " nor ".join(f"{name}.weight" for name in _candidates(spec.prefix, config))
        raise ConfigError(
            f"{path} has no scalar head (neither {names}): name its head with --ds.value_head_prefix, or take a reward "
            "model"
        )
    config.num_labels = 1
    config.value_head_prefix = EXPORTED
    saved = config.to_dict()
    mean, std = (default if saved.get(name) is None else saved[name] for name, default in (("mean", 0.0), ("std", 1.0)))
    set_statistics(config, mean, std, source=f"config.json of {path}")
    return weight


def set_statistics(config: PretrainedConfig, mean: Any, std: Any, *, source: str) -> None:
    """Records the statistics of a reward model's scores in its config: a normalised score is (score - mean) / std.

    Args:
        source: where the numbers come from, for the error.

    Raises: ConfigError where they are not finite numbers, or ``std`` is not above 0.
    """
    for name, value in (("mean", mean), ("std", std)):
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or (name == "std" and value <= 0):
            raise ConfigError(
                f"{source} gives {value!r} as the {name} of the rewards; it has to be a number"
                f"{' above 0' if name == 'std' else ''}"
            )
    config.mean, config.std = float(mean), float(std)


def attach_head(model: PreTrainedModel, weight: torch.Tensor, path: str | Path, pad_token_id: int | None) -> None:
    """Puts the weight in and lets the model answer for every token; collective under ZeRO-3.

    Args:
        pad_token_id: None leaves what the model's config says.

    Raises:
        ConfigError: the model's class for sequence classification is not a body with one linear layer behind it.
    """
    score = dict(model.named_children()).get(EXPORTED)
    if type(score) is not nn.Linear or score.bias is not None or model.base_model is model:
        raise ConfigError(
            f"{path} becomes a {type(model).__name__}, whose head is not one linear layer named {EXPORTED} over the "
            "last hidden states; take a decoder model"
        )
    gathered = nullcontext()
    if hasattr(score.weight, "ds_id"):
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters([score.weight], modifier_rank=0)
    with gathered, torch.no_grad():
        # Under ZeRO-3 the other ranks' copy is rank 0's.
        score.weight.copy_(weight)
    text = model.config.get_text_config()
    if pad_token_id is not None:
        # Only now: a body that is built with a pad token gives its embedding no gradient.
        text.pad_token_id = pad_token_id
    if text.pad_token_id is None:
        logger.warning("the model %s names no pad token: what is exported scores single rows only", path)
    elif text.pad_token_id in (text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]):
        logger.warning(
            "%s pads with its EOS token %s: transformers takes an EOS at the end of a row for padding and scores an "
            "export one token earlier than here; give the tokenizer a pad token of its own",
            path,
            text.pad_token_id,
        )
    ValueHead(model)
