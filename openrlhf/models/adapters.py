"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685) of models in training; ``merging.py`` has those of files.

Adapters are put into the layers of a model in place, so that it stays the transformers model that it was.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from openrlhf.config.deepspeed import ALL_LINEAR, LoraConfig
from openrlhf.config.errors import ConfigError
from openrlhf.models.four_bit import dequantised
from openrlhf.models.value_head import EXPORTED, value_head

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

# What peft calls adapters that were given no name; such a name is left out of saved files.
NAME = "default"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# What peft's own model puts before the names of the model inside.
SAVED_PREFIX = "base_model.model."
_FLAG = "--ds.lora.target_modules"
# Layers of state-space blocks whose weights are handed to kernels past the layer: an adapter there would be left out.
_PAST_THE_LAYER = frozenset({"out_proj", "dt_proj"})
_STATE_SPACE = frozenset({"bamba", "falcon_h1", "falcon_mamba", "jamba", "mamba", "mamba2", "nemotron_h"})


def target_modules(model: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """Returns: the full names of the linear layers that get an adapter.

    Raises: ConfigError for a name that fits no module, or one that cannot have an adapter.
    """
    head = model.get_output_embeddings()
    kept = {name for name, module in model.named_modules() if module is head or name == EXPORTED}
    modules = dict(model.named_modules())
    if model.config.model_type in _STATE_SPACE:
        kept |= {name for name in modules if name.rpartition(".")[2] in _PAST_THE_LAYER}
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D) and name not in kept]
    if tuple(lora.target_modules) == (ALL_LINEAR,):
        if not linear:
            raise ConfigError(f"{_FLAG} {ALL_LINEAR} finds no linear layer in a {type(model).__name__}; train it whole")
        return linear
    found: set[str] = set()
    for wanted in lora.target_modules:
        fitting = {name for name in modules if name == wanted or name.endswith(f".{wanted}")}
        if not fitting:
            there = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise ConfigError(
                f"{_FLAG} {wanted}: no module of this {type(model).__name__} has that name; its linear layers are "
                f"called {there} (or {ALL_LINEAR}, for all of them)"
            )
        other = sorted(fitting - set(linear))
        if other:
            raise ConfigError(
                f"{_FLAG} {wanted}: {other[0]} {_unfit(model, other[0])}, and only linear layers other than the head "
                f"can have an adapter; leave it out, or take {ALL_LINEAR}"
            )
        found |= fitting
    return sorted(found)


def _check_rank(rank: int, layers: list[nn.Module]) -> None:
    """Raises ConfigError for a rank that no product of two matrices over these layers can have."""
    widest = max(min(_sides(layer)) for layer in layers)
    if rank > widest:
        raise ConfigError(
            f"--ds.lora.rank {rank} is above {widest}, the smaller side of the largest layer that gets an adapter: "
            "more adds nothing; take a smaller rank"
        )


def _sides(layer: Any) -> tuple[int, int]:
    return (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.in_features, layer.out_features)


def _unfit(model: PreTrainedModel, name: str) -> str:
    module = model.get_submodule(name)
    if module is model.get_output_embeddings() or name == EXPORTED:
        return "is the head"
    if name.rpartition(".")[2] in _PAST_THE_LAYER and model.config.model_type in _STATE_SPACE:
        return "is read by a kernel past its adapter"
    return f"is a {type(module).__name__}"


def adapter_size(model: PreTrainedModel, lora: LoraConfig) -> int:
    """Returns: parameters that adapters would have; the model need not hold its weights.

    Raises: ConfigError where ``target_modules`` do not fit the model.
    """
    layers = [model.get_submodule(name) for name in target_modules(model, lora)]
    _check_rank(lora.rank, layers)
    return sum(lora.rank * sum(layer.weight.shape) for layer in layers)


def linear_size(model: PreTrainedModel) -> int:
    """Returns: parameters of the linear layers that 4-bit loading packs; the model need not hold its weights."""
    layers = [model.get_submodule(name) for name in target_modules(model, LoraConfig())]
    return sum(layer.weight.numel() for layer in layers)


def attach_adapters(
    model: PreTrainedModel, lora: LoraConfig, *, base: str | Path, seed: int, dtype: torch.dtype
) -> None:
    """Puts adapters into a model and freezes everything but them and a scalar head.

    They change nothing at first: one of their two matrices is drawn, the other is zero.

    Args:
        base: where the model was loaded from, for the folder that is saved.
        seed: of the matrices that are drawn; the same on all ranks.
        dtype: of the adapters, also where the weights below are in 4 bits.

    Raises: ConfigError where ``target_modules`` do not fit the model.
    """
    # Two seconds, which only those wait for who train adapters.
    import peft

    names = target_modules(model, lora)
    _check_rank(lora.rank, [model.get_submodule(name) for name in names])
    scalar = value_head(model) is not None
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=names,
        task_type="SEQ_CLS" if scalar else "CAUSAL_LM",
        base_model_name_or_path=str(base),
    )
    # Drawn on the CPU, and without a trace in the generators that training goes on with.
    cards = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=cards):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model, NAME)
    for layer in adapter_layers(model).values():
        for parameter in _own_parameters(layer):
            parameter.data = parameter.data.to(dtype)
    if scalar:
        model.get_submodule(EXPORTED).requires_grad_(True)


def _own_parameters(layer: LoraLayer) -> list[nn.Parameter]:
    return [layer.lora_A[NAME].weight, layer.lora_B[NAME].weight]


def adapter_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Returns: by the name of the layer that they adapt, the adapters of a model; none where it is trained whole."""
    if not has_adapters(model):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def has_adapters(model: nn.Module) -> bool:
    """Returns: whether adapters are what is trained of a model."""
    return NAME in getattr(model, "peft_config", {})


def waits_for_other(name: str) -> bool:
    """Returns: whether a parameter, by its name, gets its first gradient only once another one has moved: that of the
    drawn matrix is multiplied by the matrix that starts at zero.
    """
    return f".lora_A.{NAME}." in name


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """While it lasts, the model is the one that it was before adapters were put in, to the last bit."""
    layers = adapter_layers(model).values()
    if not layers:
        raise TypeError(f"{type(model).__name__} has no adapters that could be switched off")
    # peft's own switch would also turn gradients off and on, which ZeRO has laid its buffers out by.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@dataclass(frozen=True)
class PlainWeight:
    """A weight of the model without adapters in it.

    Attributes:
        name: as in the files of a saved model.
        parameters: all that its tensor is made of, which have to be whole for it.
        layer: its adapter; None where it has none.
    """

    name: str
    parameters: list[nn.Parameter]
    layer: LoraLayer | None = None

    def tensor(self) -> torch.Tensor:
        """Returns: the weight with its adapter merged into it, W + alpha / rank * B A computed in float32; the live
        weight itself where it has none.
        """
        weight = dequantised(self.parameters[0])
        if self.layer is None:
            return weight
        first, second = (parameter.detach().float() for parameter in self.parameters[1:])
        delta = (second @ first) * self.layer.scaling[NAME]
        return (weight.float() + (delta.T if self.layer.fan_in_fan_out else delta)).to(weight.dtype)


def plain_weights(model: nn.Module) -> list[PlainWeight]:
    """Returns: the weights of a model as they are saved and sent, adapters merged; tied ones once."""
    layers = adapter_layers(model)
    own = {id(parameter) for layer in layers.values() for parameter in _own_parameters(layer)}
    found = []
    for name, parameter in model.named_parameters():
        if id(parameter) in own:
            continue
        owner, _, leaf = name.rpartition(".")
        adapted = owner.removesuffix(".base_layer")
        if adapted == owner:
            found.append(PlainWeight(name, [parameter]))
            continue
        layer = layers[adapted] if leaf == "weight" else None
        parts = [parameter, *(_own_parameters(layer) if layer is not None else [])]
        found.append(PlainWeight(f"{adapted}.{leaf}", parts, layer))
    return found


def save_adapter(model: PreTrainedModel, trained: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Writes a folder that peft loads, and transformers where it is that of a language model. Beside a scalar head
    stands the config of its model, which holds what scores are normalised by.

    Args:
        trained: by the model's names, the whole tensors of everything that is trained.
    """
    config = copy.copy(model.peft_config[NAME])
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)
    scalar = value_head(model) is not None
    config.modules_to_save = [EXPORTED] if scalar else None
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    tensors = {f"{SAVED_PREFIX}{name.replace(f'.{NAME}.', '.')}": tensor for name, tensor in trained.items()}
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / ADAPTER_WEIGHTS, {"format": "pt"}
    )
    if not scalar:
        return
    plain: Any = copy.deepcopy(model.config)
    # The base model's files are not in 4 bits.
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    plain.save_pretrained(folder)
