"""The layers of a decoder as compiled graphs."""

from __future__ import annotations

import shutil

from torch import nn

from openrlhf.config.errors import ConfigError

FLAG = "--ds.torch_compile"


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Returns: the repeated layers of a transformers model, those that its class says must not be split."""
    kept_whole = set(getattr(model, "_no_split_modules", None) or [])
    return [
        layer
        for stack in model.modules()
        if isinstance(stack, nn.ModuleList)
        for layer in stack
        if type(layer).__name__ in kept_whole
    ]


def compile_layers(model: nn.Module) -> None:
    """Compiles each decoder layer, in place: names of modules and parameters stay. Graphs are made at the first
    forward, and serve rows and micro-batches of any size.

    Layer by layer, because all layers share one graph, the output head answers requests of ours that no graph knows,
    and gradient checkpointing goes around a layer.

    Raises: ConfigError where no layers are found, or where nothing can be compiled here.
    """
    layers = decoder_layers(model)
    if not layers:
        raise ConfigError(f"{FLAG} finds no decoder layers in a {type(model).__name__}; leave the flag out")
    if not any(shutil.which(compiler) for compiler in ("g++", "gcc", "clang++", "clang", "cc")):
        raise ConfigError(f"{FLAG} needs a C++ compiler, and none is on the PATH; install g++, or leave the flag out")
    for layer in layers:
        layer.compile(dynamic=True)
