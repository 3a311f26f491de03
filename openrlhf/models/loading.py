"""Loads what transformers saved: models ready for packed rows, and tokenizers with a pad token."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from openrlhf.config.checks_system import looks_local
from openrlhf.config.deepspeed import LoraConfig
from openrlhf.config.errors import ConfigError
from openrlhf.config.precision import PRECISIONS
from openrlhf.models.adapters import attach_adapters
from openrlhf.models.attention import choose_attention
from openrlhf.models.four_bit import check_head, keep_layout, loading_arguments
from openrlhf.models.liger import apply_liger
from openrlhf.models.training_mode import checkpoint_layers, without_dropout
from openrlhf.models.value_head import EXPORTED_WEIGHT, HeadSpec, attach_head, prepare_head

logger = logging.getLogger(__name__)

# --ds.param_dtype -> torch's type.
DTYPES: dict[str, torch.dtype] = {flag: getattr(torch, precision.name) for flag, precision in PRECISIONS.items()}

# What transformers raises over what it finds or does not find: files that are missing or broken, a hub that cannot be
# reached, a kind of model that it does not know, code that needs a package.
_READ_ERRORS = (OSError, ValueError, KeyError, ImportError, SafetensorError)

# What is said of a weight whose shape does not fit while parameters are born sharded: its name, and both shapes.
MISFIT = re.compile(r"size mismatch for (\S+): .*?Size\((\[.*?\])\).*?Size\((\[.*?\])\)")


@contextmanager
def reading(what: str, path: str | Path) -> Iterator[None]:
    """Turns what a missing, unreachable, unknown or broken model raises into one sentence.

    Raises: ConfigError.
    """
    try:
        yield
    except ConfigError:
        raise
    except RuntimeError as error:
        misfit = MISFIT.search(str(error))
        if misfit is None:
            raise
        raise _misfit_error(path, *misfit.groups()) from error
    except _READ_ERRORS as error:
        if looks_local(str(path)) and not Path(path).expanduser().exists():
            reason = "there is no such folder"
        elif "trust_remote_code" in str(error):
            reason = "it comes with Python code of its own, which runs only where --trust_remote_code allows it"
        else:
            reason = shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
        raise ConfigError(f"no {what} can be loaded from {path}: {reason}") from error


def load_config(path: str | Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Loads the config of a model.

    Raises: ConfigError where there is none that transformers knows.
    """
    with reading("model", path):
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def context_length(config: PretrainedConfig) -> int | None:
    """Returns: tokens that a model was made for, stretched rotary positions counted; None where nothing bounds them."""
    text = config.get_text_config()
    length = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    # Kinds of stretching whose factor is not yet in max_position_embeddings. A model with several kinds of layers
    # (Gemma 3) has a dictionary for each, and its length is the stretched one.
    if length is not None and rope.get("rope_type") in ("linear", "dynamic", "yarn"):
        length = max(length, int(rope.get("factor", 1.0) * (rope.get("original_max_position_embeddings") or length)))
    return length


def check_context(path: str | Path, max_len: int, *, trust_remote_code: bool = False) -> None:
    """Raises ConfigError where rows of ``max_len`` tokens (--data.max_len) are longer than a model can place."""
    context = context_length(load_config(path, trust_remote_code=trust_remote_code))
    if context is not None and max_len > context:
        raise ConfigError(
            f"--data.max_len {max_len} is longer than the {context} tokens that {path} was made for; lower it."
        )


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


@contextmanager
def _told_to_all(sharded: bool) -> Iterator[None]:
    """Rank 0 alone reads what is born sharded, and would leave the others waiting with what it finds wrong.

    Raises: ConfigError on every rank where any rank met one.
    """
    problem: ConfigError | None = None
    try:
        yield
    except ConfigError as error:
        problem = error
    said = [None if problem is None else str(problem)]
    if sharded:
        said *= dist.get_world_size()
        dist.all_gather_object(said, said[0])
    first = next((text for text in said if text is not None), None)
    if first is not None:
        raise ConfigError(first) from problem


@contextmanager
def without_load_report() -> Iterator[None]:
    """While it lasts, transformers prints no table of weights that a file lacks or has too many: with a scalar head it
    would warn of a head at random, which is ours, and of logits that nobody wants. What is missing or does not fit is
    an error anyway, and what is too much is said in one line.
    """

    def is_no_report(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    # A filter, because transformers says other things where the level of this logger is high.
    speaker = logging.getLogger("transformers.modeling_utils")
    speaker.addFilter(is_no_report)
    try:
        yield
    finally:
        speaker.removeFilter(is_no_report)


def _restore_buffers(
    model: PreTrainedModel, auto_class: Any, config: Any, dtype: torch.dtype, trust_remote_code: bool
) -> None:
    """Puts back what sharding at birth rounded.

    DeepSpeed gives every tensor that is made under it the parameters' dtype. Rotary frequencies in bf16 are off by up
    to 0.4 %: at position 1,000 an angle is off by radians, and the model no longer is the one that the engine runs.
    """
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        skeleton = auto_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    saved = set(skeleton.state_dict())
    for name, true in skeleton.named_buffers():
        owner, _, leaf = name.rpartition(".")
        rounded = model.get_submodule(owner)._buffers[leaf]
        if name not in saved:
            model.get_submodule(owner)._buffers[leaf] = true.to(rounded.device)
        elif rounded.dtype != true.dtype:
            logger.warning("%s was rounded to %s by ZeRO-3 while it was loaded", name, rounded.dtype)


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
    liger: bool = False,
    zero3: dict[str, Any] | None = None,
    head: HeadSpec | None = None,
    lora: LoraConfig | None = None,
    load_in_4bit: bool = False,
    seed: int = 42,
) -> PreTrainedModel:
    """Loads a causal language model, dropout off but for that of adapters.

    Args:
        path: folder or hub name.
        attn_implementation: ``--ds.attn_implementation``; "auto" takes the best that is installed.
        experts_implementation: ``--ds.experts_implementation``; None leaves it to transformers.
        liger: ``--ds.use_liger_kernel``, on GPUs.
        zero3: the DeepSpeed config where parameters are to be sharded at birth; they then stand on the device that
            DeepSpeed chose.
        head: a scalar head in place of the one that gives logits (a critic, a reward model).
        lora: adapters, which are all that can be trained then, beside a scalar head; None for none.
        load_in_4bit: the linear layers are held as nf4, which cannot be trained; not with ``zero3``.
        seed: of fresh adapters; the same on all ranks.

    Raises:
        ConfigError: there is no such model, it cannot be read, the attention kernel cannot run here, or the model has
            no scalar head where one was asked for, or Liger no kernels for it.
    """
    device = torch.device(device)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    if experts_implementation is not None:
        options["experts_implementation"] = experts_implementation
    if load_in_4bit:
        options |= loading_arguments(dtype, device)
    model = _read_model(path, device, attn_implementation, zero3, head, options)
    if load_in_4bit:
        check_head(model, path)
        keep_layout(model)
    without_dropout(model)
    if liger:
        apply_liger(model)
    if lora is not None:
        attach_adapters(model, lora, base=path, seed=seed, dtype=dtype)
    if gradient_checkpointing:
        checkpoint_layers(model, gradient_checkpointing_reentrant)
    return model if zero3 is not None else model.to(device)


def _read_model(
    path: str | Path,
    device: torch.device,
    attn_implementation: str,
    zero3: dict[str, Any] | None,
    head: HeadSpec | None,
    options: dict[str, Any],
) -> PreTrainedModel:
    """Reads the weights; each of them comes from the files, or the model is refused.

    Args: ``options``: further arguments of ``from_pretrained``, ``dtype`` and ``trust_remote_code`` among them.
    """
    dtype, trust_remote_code = options["dtype"], options["trust_remote_code"]
    config = load_config(path, trust_remote_code=trust_remote_code)
    auto_class = AutoModelForCausalLM if head is None else AutoModelForSequenceClassification
    model_class = _model_class(auto_class, config, path, trust_remote_code)
    implementation = choose_attention(config, model_class, attn_implementation, device, dtype)
    sharded = zero3 is not None
    with _told_to_all(sharded), reading("model", path), _parameters_born_sharded(zero3), without_load_report():
        head_weight = None if head is None else prepare_head(path, config, head)
        model, report = auto_class.from_pretrained(
            path,
            config=config,
            attn_implementation=implementation,
            output_loading_info=True,
            # A scalar head replaces whatever other head the files hold; any other misfit is refused below, by name.
            ignore_mismatched_sizes=True,
            **options,
        )
    if head is not None:
        attach_head(model, head_weight, path, head.pad_token_id)
    check_report(path, report, has_head=head is not None)
    if sharded:
        _restore_buffers(model, auto_class, config, dtype, trust_remote_code)
    return model


def _misfit_error(path: str | Path, name: str, found: Any, wanted: Any) -> ConfigError:
    return ConfigError(
        f"the files of {path} do not fit its config.json: {name} is {found} in the files and {wanted} by the config"
    )


def check_report(path: str | Path, report: dict[str, Any], *, has_head: bool) -> None:
    """Raises ConfigError where the files lack weights or hold them in other shapes; warns where they hold more.

    Args: ``has_head``: of a scalar head's model, where files may hold another head.
    """
    if has_head:
        misfits = {name for name, *_ in report["mismatched_keys"]}
        _check_whole(path, (set(report["missing_keys"]) | misfits) - {EXPORTED_WEIGHT})
        return
    _check_shapes(path, report["mismatched_keys"])
    _check_whole(path, report["missing_keys"])
    if report["unexpected_keys"]:
        logger.warning("%s holds weights that the model has no use for: %s", path, few(report["unexpected_keys"]))


def _check_shapes(path: str | Path, misfits: Collection[tuple[str, torch.Size, torch.Size]]) -> None:
    """Raises ConfigError for weights of another shape than the config's: transformers would draw them at random."""
    if misfits:
        name, found, wanted = min(misfits)
        raise _misfit_error(path, name, list(found), list(wanted))


def _check_whole(path: str | Path, missing: Collection[str]) -> None:
    """Raises ConfigError for weights that the files lack: transformers draws them at random, and training goes on."""
    if missing:
        raise ConfigError(f"the files of {path} lack weights of the model that config.json describes: {few(missing)}")


def few(names: Collection[str]) -> str:
    """Returns: the first three names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + more


def _model_class(auto_class: Any, config: Any, path: str | Path, trust_remote_code: bool) -> type[PreTrainedModel]:
    """The class that will be made, to be asked which attention it can run."""
    own_code = getattr(config, "auto_map", None) or {}
    if trust_remote_code and auto_class.__name__ in own_code:
        return get_class_from_dynamic_module(own_code[auto_class.__name__], str(path))
    mapping = auto_class._model_mapping
    if type(config) not in mapping:
        kind = "causal language model" if auto_class is AutoModelForCausalLM else "model with a scalar head"
        raise ConfigError(f"{path} holds a {config.model_type}, which transformers cannot run as a {kind}")
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

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    with reading("tokenizer", path):
        tokenizer = AutoTokenizer.from_pretrained(path, use_fast=use_fast, trust_remote_code=trust_remote_code)
    # Where its files are missing, transformers makes some tokenizers out of nothing, which turn every text into none.
    if tokenizer.get_vocab().keys() <= {str(token) for token in tokenizer.added_tokens_decoder.values()}:
        raise ConfigError(f"no tokenizer can be loaded from {path}: its vocabulary is empty, so its files are missing")
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
    for token in (*spare, tokenizer.unk_token, tokenizer.eos_token):
        if token is not None:
            return token
    raise ConfigError(
        f"the tokenizer of {tokenizer.name_or_path} has neither a pad nor an unknown nor an EOS token, so nothing can "
        "fill rows up: give it a pad_token in tokenizer_config.json"
    )


def keep_pad_apart(tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> bool:
    """Gives a tokenizer that pads with the end of a row another pad token, one that ends no row.

    transformers takes every pad token at the end of a row for padding, so it would score an exported reward model one
    token too early there.

    Args:
        ends: ids that end rows, beside the tokenizer's EOS.

    Returns: whether padding and end are apart now.
    """
    ends = {*ends, tokenizer.eos_token_id}
    if tokenizer.pad_token_id not in ends:
        return True
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    unused = [token for token in special if token not in (tokenizer.chat_template or "")]
    candidates = [_spare_token(tokenizer), *(token for token in unused if "pad" in token), tokenizer.unk_token]
    for token in (*candidates, tokenizer.bos_token, *unused):
        if token is not None and tokenizer.convert_tokens_to_ids(token) not in ends:
            tokenizer.pad_token = token
            return True
    return False
