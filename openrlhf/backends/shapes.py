"""The shapes of a model's parameters, which a state has to share with the model that it is loaded into."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from openrlhf.config.errors import ConfigError

# In a state: the shape of every parameter of the model that it belongs to.
SHAPES_FILE = "parameters.json"

Shapes = Mapping[str, Sequence[int]]


def parameter_shapes(module: torch.nn.Module) -> dict[str, list[int]]:
    """Returns: by name, the whole shape of each parameter, sharded or not."""
    return {name: list(getattr(item, "ds_shape", item.shape)) for name, item in module.named_parameters()}


def difference_of(there: Shapes, here: Shapes) -> str | None:
    """Returns: in words, a parameter that two models do not share; None where they have the same shapes."""
    for name, shape in here.items():
        if name in there and list(there[name]) != list(shape):
            return f"{name} is {list(there[name])} there and {list(shape)} in this run"
    for these, those, where in ((here, there, "there"), (there, here, "in this run")):
        missing = next((name for name in these if name not in those), None)
        if missing is not None:
            return f"{missing} is missing {where}"
    return None


def write_shapes(folder: Path, shapes: Shapes) -> None:
    """Says in the state ``folder`` which model it belongs to. Raises: OSError."""
    (folder / SHAPES_FILE).write_text(json.dumps(dict(shapes)) + "\n")


def refuse_other_model(folder: Path, shapes: Shapes) -> None:
    """To be asked before a state is loaded: DeepSpeed would, on some stages, lay parts of one weight into another.

    Args:
        folder: of the state. A kill right after it was whole leaves it without the file that says what it is of.
        shapes: of the model that it is to be loaded into.

    Raises:
        ConfigError: another model has written it.
        OSError: the file cannot be read.
    """
    file = folder / SHAPES_FILE
    difference = difference_of(json.loads(file.read_text()), shapes) if file.exists() else None
    if difference is not None:
        raise ConfigError(
            f"the checkpoint {folder} was written by another model: {difference}; resume with the model of the "
            "run that wrote it, or start anew without --ckpt.load_enable"
        )
