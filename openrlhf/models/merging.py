"""A LoRA adapter and its base made into one model, on the CPU and one module at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from openrlhf.config.checks_system import check_whole_model, looks_local
from openrlhf.config.errors import ConfigError
from openrlhf.models.adapter_files import SETTINGS_FILE, AdapterFiles, read_adapter
from openrlhf.models.adapters import ADAPTER_WEIGHTS, SAVED_PREFIX
from openrlhf.models.loading import (
    DTYPES,
    MISFIT,
    check_report,
    few,
    load_config,
    reading,
    without_load_report,
)
from openrlhf.models.merged_folder import check_room, write_merged
from openrlhf.models.tokenizer_copy import tokenizer_folder
from openrlhf.models.value_head import EXPORTED, HeadSpec, prepare_head, set_statistics

# What peft raises over an adapter that does not belong to the model, and over one that cannot be merged.
_PEFT_ERRORS = (ValueError, KeyError, IndexError, RuntimeError, TypeError, NotImplementedError, AttributeError)


@dataclass(frozen=True)
class MergeSpec:
    """What is merged into what.

    Attributes:
        model_path: folder or hub name of the base; None takes the one that the adapter names.
        lora_path: folder of the adapter.
        output_path: folder for the merged model.
        is_rm: the adapter is that of a reward model, and the merged model has a scalar head.
        param_dtype: ``--ds.param_dtype``, of the merged weights.
        trust_remote_code: code that the base brings along may run.
    """

    model_path: str | None
    lora_path: str
    output_path: str
    is_rm: bool = False
    param_dtype: str = "bf16"
    trust_remote_code: bool = False


def merge_folders(spec: MergeSpec, note: Callable[[str], None]) -> None:
    """Merges --lora_path into --model_path and writes --output_path.

    Args: ``note`` is told in a line what was found and what is done.

    Raises:
        ConfigError: one of the folders cannot be used, or the adapter does not fit the base.
        RunError: the model could not be written; nothing of it is left then.
    """
    adapter = read_adapter(spec.lora_path)
    adapter.check_kind(is_rm=spec.is_rm)
    base = _base_of(spec, adapter, note)
    dtype = DTYPES[spec.param_dtype]
    note(f"loading {base} in {spec.param_dtype}")
    model, adapter = _load_base(base, adapter, spec, dtype)
    check_room(model, spec.output_path)
    merged = merge(model, adapter, dtype)
    _check_finite(merged, spec.param_dtype)
    tokenizer = tokenizer_folder(adapter.folder) or tokenizer_folder(base)
    if tokenizer is None:
        note(f"neither {adapter.folder} nor {base} has a tokenizer: the merged folder has none")
    folder = Path(spec.output_path).expanduser()
    size = write_merged(merged, folder, tokenizer, is_rm=spec.is_rm, trust_remote_code=spec.trust_remote_code)
    note(f"merged model: {folder} ({size / 1e9:.3g} GB)")


def _base_of(spec: MergeSpec, adapter: AdapterFiles, note: Callable[[str], None]) -> str:
    """The base that is named, or else the one that the adapter names."""
    base = spec.model_path or adapter.base
    if not base:
        raise ConfigError(
            f"--model_path is missing, and {adapter.folder} does not say which model it was trained on: name the base"
        )
    if spec.model_path is None:
        note(f"--model_path: {base}, which the adapter names as its base")
    elif adapter.base and Path(adapter.base).name != Path(base).name:
        note(f"the adapter names {adapter.base} as its base; merging it into {base}")
    if looks_local(base):
        check_whole_model("model_path", Path(base))
    return base


def _load_base(
    path: str, adapter: AdapterFiles, spec: MergeSpec, dtype: torch.dtype
) -> tuple[PreTrainedModel, AdapterFiles]:
    """Loads the base with as many embeddings as the adapter has, and for a reward model with its scalar head.

    Returns: the model on the CPU, and the adapter with its head, if it holds one, under the name that the model uses.
    """
    loaded = load_config(path, trust_remote_code=spec.trust_remote_code)
    quantised = loaded.to_dict().get("quantization_config")
    if quantised:
        kind = dict(quantised).get("quant_method", "unknown")
        raise ConfigError(
            f"--model_path {path} holds quantised weights ({kind}), into which nothing can be merged exactly: take the "
            "model that it was made from"
        )
    head = None
    with reading("model", path):
        if spec.is_rm:
            adapter = adapter.with_exported_head(
                loaded.get_text_config().hidden_size, _head_names(adapter.model_config, loaded.to_dict())
            )
            head = _prepare_head(path, loaded, adapter)
        auto_class = AutoModelForSequenceClassification if spec.is_rm else AutoModelForCausalLM
        with without_load_report():
            model, report = auto_class.from_pretrained(
                path,
                config=loaded,
                dtype=dtype,
                trust_remote_code=spec.trust_remote_code,
                output_loading_info=True,
                # A scalar head replaces whatever other head the files hold; any other misfit is refused by name.
                ignore_mismatched_sizes=True,
            )
    if head is not None:
        _put_head(model, head, path)
    check_report(path, report, has_head=head is not None)
    _fit_vocabulary(model, adapter, path)
    return model, adapter


def _head_names(*configs: Any) -> list[str]:
    own = [config.get("value_head_prefix") for config in configs]
    return list(dict.fromkeys(name for name in (*own, EXPORTED) if name))


def _prepare_head(path: str, loaded: PretrainedConfig, adapter: AdapterFiles) -> torch.Tensor:
    """Makes the config that of a reward model, with the statistics of the adapter's training where they are known.

    Returns: the base's head, or one that the adapter's will replace.
    """
    trained = EXPORTED in adapter.heads
    try:
        weight = prepare_head(path, loaded, HeadSpec(fresh=trained))
    except ConfigError as error:
        raise ConfigError(f"{error}; the adapter {adapter.folder} holds no head either") from error
    beside = adapter.model_config
    if beside.get("mean") is not None and beside.get("std") is not None:
        set_statistics(loaded, beside["mean"], beside["std"], source=f"config.json of {adapter.folder}")
    return weight


def _put_head(model: PreTrainedModel, weight: torch.Tensor, path: str) -> None:
    score = dict(model.named_children()).get(EXPORTED)
    if type(score) is not nn.Linear or score.bias is not None:
        raise ConfigError(
            f"{path} becomes a {type(model).__name__}, whose head is not one linear layer named {EXPORTED}; take a "
            "decoder model"
        )
    with torch.no_grad():
        score.weight.copy_(weight)


def _fit_vocabulary(model: PreTrainedModel, adapter: AdapterFiles, path: str) -> None:
    """Gives the base as many embeddings as the model had that the adapter was trained on.

    Raises: ConfigError where new ones would be left without values.
    """
    embeddings = model.get_input_embeddings()
    ends = {name for name, module in model.named_modules() if module in (embeddings, model.get_output_embeddings())}
    rows = {count for name in ends for count in _rows_of(name, adapter.weights)}
    if len(rows) > 1:
        raise ConfigError(
            f"--lora_path {adapter.folder} holds embeddings of several vocabularies ({sorted(rows)} tokens)"
        )
    known = embeddings.num_embeddings
    wanted = rows.pop() if rows else known
    if wanted == known:
        return
    whole = [name for name in ends if any(_is_whole(name, weight) for weight in adapter.weights)]
    tied = model.config.get_text_config().tie_word_embeddings
    if not whole or (len(whole) < len(ends) and not tied):
        raise ConfigError(
            f"the adapter {adapter.folder} was trained on {wanted} embeddings, {path} has {known}, and the adapter "
            "does not hold the new ones: save it with save_embedding_layers=True, or give the base that was resized"
        )
    model.resize_token_embeddings(wanted, mean_resizing=False)


def _is_whole(module: str, weight: str) -> bool:
    return weight.startswith(f"{SAVED_PREFIX}{module}.") and weight.endswith(".weight") and "lora_" not in weight


def _rows_of(module: str, weights: dict[str, torch.Tensor]) -> set[int]:
    """Sizes of the vocabulary, by the weights that an adapter has for an embedding or an output head."""
    found = set()
    for name, weight in weights.items():
        if _is_whole(module, name) or name == f"{SAVED_PREFIX}{module}.lora_B.weight":
            found.add(weight.shape[0])
        elif name == f"{SAVED_PREFIX}{module}.lora_embedding_A":
            found.add(weight.shape[1])
    return found


def merge(model: PreTrainedModel, adapter: AdapterFiles, dtype: torch.dtype) -> PreTrainedModel:
    """Adds an adapter to the weights of its base, each sum computed in float32 and rounded once.

    Args:
        model: the base; it is changed.
        dtype: of its weights, and of those that the adapter brings along.

    Returns: a plain model whose outputs are those of base and adapter together.

    Raises: ConfigError where they do not belong together.
    """
    tied = model.config.get_text_config().tie_word_embeddings
    # Some models keep a few of them in float32 whatever is asked for.
    dtypes = {name: tensor.dtype for name, tensor in chain(model.named_parameters(), model.named_buffers())}
    with warnings.catch_warnings(action="ignore"), _refusing(adapter, "does not fit its base"):
        peft_model = PeftModel(model, adapter.settings)
        _check_loaded(adapter, set_peft_model_state_dict(peft_model, adapter.weights))
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if any(isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) for module in ends):
        _part_shared(peft_model)
    layers = [module for module in peft_model.modules() if isinstance(module, BaseTunerLayer)]
    with warnings.catch_warnings(action="ignore"), _refusing(adapter, "cannot be merged"), torch.no_grad():
        for layer in tqdm(layers, desc="merging", disable=None, leave=False):
            layer.get_base_layer().float()
            layer.merge()
        merged = peft_model.unload()
        for name, parameter in merged.named_parameters():
            parameter.data = parameter.data.to(dtypes.get(name, dtype))
        for name, buffer in merged.named_buffers():
            buffer.data = buffer.data.to(dtypes.get(name, buffer.dtype))
    if tied:
        _tie_again(merged, forced=bool(adapter.settings.ensure_weight_tying))
    return merged


def _part_shared(model: nn.Module) -> None:
    """Gives each module that shares a weight with another one its own copy: what an adapter adds to an embedding would
    else be added to the output head too, which the adapter did not change.
    """
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) in seen:
                module._parameters[name] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            seen.add(id(parameter))


def _tie_again(model: PreTrainedModel, *, forced: bool) -> None:
    """Ties input and output embeddings where they still hold the same; elsewhere the config says that they differ.

    Args: ``forced``: they were one weight in training; merging apart may round them apart.
    """
    text = model.config.get_text_config()
    given, out = model.get_input_embeddings(), model.get_output_embeddings()
    if out is None:
        return
    one = forced or torch.equal(given.weight, out.weight)
    if one:
        out.weight = given.weight
    for config in {id(model.config): model.config, id(text): text}.values():
        config.tie_word_embeddings = one


@contextmanager
def _refusing(adapter: AdapterFiles, problem: str) -> Iterator[None]:
    """Turns what peft raises over an adapter into one sentence."""
    try:
        yield
    except ConfigError:
        raise
    except _PEFT_ERRORS as error:
        misfit = MISFIT.search(str(error))
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if misfit is not None:
            name, found, wanted = misfit.groups()
            reason = f"{name} is {found} in the adapter, and the base takes {wanted}"
        elif isinstance(error, KeyError):
            reason = f"{SETTINGS_FILE} names what {ADAPTER_WEIGHTS} lacks: {error.args[0]}"
        raise ConfigError(f"the adapter {adapter.folder} {problem}: {reason}") from error


def _check_loaded(adapter: AdapterFiles, result: Any) -> None:
    """Raises: ConfigError for weights of the file that went nowhere, and for parts that got none."""
    missing = [name for name in result.missing_keys if "lora_" in name or ".modules_to_save." in name]
    unused = {name: adapter.weights[name] for name in result.unexpected_keys if name in adapter.weights}
    used = [weight for name, weight in adapter.weights.items() if name not in unused]
    # Of weights that are tied or were resized, peft writes several copies and reads one.
    lost = [name for name, weight in unused.items() if not any(torch.equal(weight, other) for other in used)]
    lost += [name for name in result.unexpected_keys if name not in adapter.weights]
    for names, problem in (
        (lost, "holds weights that the base has no place for"),
        (missing, "lacks weights that its adapter_config.json promises"),
    ):
        if names:
            raise ConfigError(f"the adapter {adapter.folder} {problem}: {few(names)}")


def _check_finite(model: nn.Module, param_dtype: str) -> None:
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            wider = {"fp16": "bf16, or fp32", "bf16": "fp32"}.get(param_dtype)
            raise ConfigError(
                f"merged, {name} holds values that are no finite numbers in {param_dtype}: "
                + (f"take --ds.param_dtype {wider}" if wider else "the files of the base or of the adapter are damaged")
            )
