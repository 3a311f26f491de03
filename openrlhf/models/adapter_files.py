"""A folder that holds a LoRA adapter, as peft writes it: read, and refused where it cannot become part of a model."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file

from openrlhf.config.errors import ConfigError
from openrlhf.models.adapters import ADAPTER_WEIGHTS, SAVED_PREFIX
from openrlhf.models.value_head import EXPORTED

SETTINGS_FILE, PICKLED_FILE = "adapter_config.json", "adapter_model.bin"

# Settings of an adapter that does more than add to weights, so that no weight can say the same.
_NO_SUM = {
    "alora_invocation_tokens": "it acts from some token on alone",
    "arrow_config": "it is a router between adapters",
    "layer_replication": "it repeats layers of its base",
    "megatron_config": "it belongs to a Megatron model",
}


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter that was read.

    Attributes:
        folder: where it stands.
        settings: adapter_config.json.
        weights: by name, as they stand in the file.
        base: folder or hub name of the model that it was trained on, as the adapter says; None where it does not.
        model_config: what a config.json beside it says of the whole model; empty where there is none.
    """

    folder: Path
    settings: LoraConfig
    weights: dict[str, torch.Tensor]
    base: str | None
    model_config: Mapping[str, Any]

    @property
    def heads(self) -> dict[str, torch.Tensor]:
        """Weights of whole modules that stand beside the model's body and not in it, by the module's name."""
        found = {re.fullmatch(re.escape(SAVED_PREFIX) + r"([^.]+)\.weight", name): name for name in self.weights}
        return {match[1]: self.weights[name] for match, name in found.items() if match}

    def check_kind(self, *, is_rm: bool) -> None:
        """Raises: ConfigError where the adapter is not of the kind of model that --is_rm says."""
        task = str(getattr(self.settings.task_type, "value", self.settings.task_type or ""))
        if task not in ("", "CAUSAL_LM", "SEQ_CLS"):
            raise ConfigError(
                f"--lora_path {self.folder} is an adapter for the task {task}; only those of language models "
                "(CAUSAL_LM) and of reward models (SEQ_CLS) are merged"
            )
        if is_rm and task == "CAUSAL_LM":
            raise ConfigError(
                f"--is_rm: {self.folder} is the adapter of a language model (task_type CAUSAL_LM), which has no scalar "
                "head; leave --is_rm out, or give the adapter of a reward model"
            )
        scalar = [name for name, weight in self.heads.items() if weight.dim() == 2 and weight.shape[0] == 1]
        if not is_rm and (task == "SEQ_CLS" or scalar):
            raise ConfigError(
                f"--lora_path {self.folder} is the adapter of a reward model "
                f"({f'it holds the scalar head {scalar[0]}' if scalar else 'task_type SEQ_CLS'}); add --is_rm"
            )

    def with_exported_head(self, hidden_size: int, prefixes: list[str]) -> AdapterFiles:
        """Gives the scalar head that the adapter holds, if it holds one, the name that transformers looks for.

        Args:
            prefixes: names that are searched first.

        Raises: ConfigError where there are several, or one that does not give one score.
        """
        heads = self.heads
        names = [name for name in prefixes if name in heads] or sorted(heads)
        if not names:
            return self
        if len(names) > 1 and names[0] not in prefixes:
            raise ConfigError(f"--lora_path {self.folder} holds several heads ({', '.join(names)}) instead of one")
        name, weight = names[0], heads[names[0]]
        if tuple(weight.shape) != (1, hidden_size):
            raise ConfigError(
                f"--is_rm: the head {name}.weight of {self.folder} has the shape {list(weight.shape)}, and a reward "
                f"model's is {[1, hidden_size]}: this adapter belongs to a classifier of another kind"
            )
        bias = self.weights.get(f"{SAVED_PREFIX}{name}.bias")
        if bias is not None and bool(bias.any()):
            raise ConfigError(
                f"--is_rm: the head {name} of {self.folder} has a bias, which a model for sequence classification "
                "cannot hold; take it out (a constant added to every score)"
            )
        weights = {key: value for key, value in self.weights.items() if not key.startswith(f"{SAVED_PREFIX}{name}.")}
        weights[f"{SAVED_PREFIX}{EXPORTED}.weight"] = weight
        settings = copy.copy(self.settings)
        settings.modules_to_save = [other for other in settings.modules_to_save or [] if other not in heads]
        settings.modules_to_save.append(EXPORTED)
        return replace(self, weights=weights, settings=settings)


def read_adapter(path: str | Path) -> AdapterFiles:
    """Reads an adapter; nothing is unpickled.

    Raises: ConfigError where there is none, it is not LoRA, it cannot be written as a sum of weights, or it is damaged.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--lora_path {path}: there is no such folder")
    if not (folder / SETTINGS_FILE).is_file():
        whole = (folder / "config.json").is_file()
        raise ConfigError(
            f"--lora_path {path} is not an adapter: there is no {SETTINGS_FILE} in it"
            f"{', but a whole model, which needs no merging' if whole else ''}"
        )
    raw = _read_json(folder / SETTINGS_FILE)
    settings = _read_settings(folder, raw)
    weights = _read_weights(folder)
    beside = folder / "config.json"
    return AdapterFiles(
        folder=folder,
        settings=settings,
        weights=weights,
        base=raw.get("base_model_name_or_path") or None,
        model_config=_read_json(beside) if beside.is_file() else {},
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds {type(found).__name__}, not an object")
    return found


def _read_settings(folder: Path, raw: Mapping[str, Any]) -> LoraConfig:
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise ConfigError(
            f"--lora_path {folder} is an adapter of the type {kind or 'that its file does not name'}; only LoRA is "
            "merged here (for others, merge_and_unload() of the package peft)"
        )
    for name, why in _NO_SUM.items():
        if raw.get(name):
            raise ConfigError(f"--lora_path {folder} cannot be merged: {why} ({name} in {SETTINGS_FILE})")
    try:
        settings = LoraConfig.from_pretrained(str(folder))
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder / SETTINGS_FILE} does not describe a LoRA adapter: {error}") from error
    # As peft reads an adapter that is to be used: nothing is drawn anew for training.
    settings.inference_mode = True
    return settings


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    file = folder / ADAPTER_WEIGHTS
    if not file.is_file():
        if (folder / PICKLED_FILE).is_file():
            raise ConfigError(
                f"--lora_path {folder} holds {PICKLED_FILE}, a pickle, which can run code when it is read, and is not "
                f"read here: save the adapter again as {ADAPTER_WEIGHTS} (save_pretrained of a recent peft does)"
            )
        raise ConfigError(f"--lora_path {folder} lacks the weights of the adapter: there is no {ADAPTER_WEIGHTS} in it")
    try:
        weights = load_file(str(file))
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not any("lora_" in name for name in weights):
        raise ConfigError(f"{file} holds no weights of LoRA matrices ({len(weights)} others)")
    for name, weight in weights.items():
        if weight.is_floating_point() and not bool(torch.isfinite(weight).all()):
            raise ConfigError(f"{file} holds values in {name} that are no finite numbers: the training went astray")
        if weight.numel() == 0:
            raise ConfigError(
                f"{file} holds nothing in {name} (shape {list(weight.shape)}): weights that were sharded over ranks "
                "were saved without being gathered"
            )
    return weights
