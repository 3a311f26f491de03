"""The folder of a merged model: written beside its place, whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from openrlhf.config.checks_combiner import PARTIAL
from openrlhf.config.errors import ConfigError
from openrlhf.models.loading import keep_pad_apart, load_tokenizer
from openrlhf.models.tokenizer_copy import copy_tokenizer
from openrlhf.utils.errors import RunError
from openrlhf.utils.move_files import move_files


def check_room(model: nn.Module, output: str) -> None:
    """Raises: ConfigError where the disk of --output_path has no room for the model."""
    nearest = Path(output).expanduser().absolute()
    while not nearest.exists():
        nearest = nearest.parent
    needed = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    free = shutil.disk_usage(nearest).free
    if free < needed:
        raise ConfigError(
            f"--output_path {output}: the merged model takes {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free "
            "there"
        )


def write_merged(
    model: PreTrainedModel, folder: Path, tokenizer: Path | None, *, is_rm: bool, trust_remote_code: bool
) -> int:
    """Writes a model and its tokenizer.

    Args:
        folder: empty, or not there.
        tokenizer: folder of the tokenizer; None writes none.
        is_rm: it is a reward model, which has to pad with another token than EOS.

    Returns: bytes of all files.

    Raises:
        ConfigError: the tokenizer cannot be used.
        RunError: it could not be written; nothing of it is left then.
    """
    existed = folder.exists()
    partial = folder / PARTIAL
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if tokenizer is not None:
            _write_tokenizer(model, tokenizer, partial, is_rm=is_rm, trust_remote_code=trust_remote_code)
        model.save_pretrained(partial, max_shard_size="5GB")
        move_files(partial, folder, last=["config.json"])
        partial.rmdir()
    except ConfigError:
        _clear(folder, existed)
        raise
    except Exception as error:  # safetensors and tokenizers each raise a type of their own for a full disk
        _clear(folder, existed)
        raise RunError(f"writing the merged model to {folder} failed, and nothing is left of it: {error}") from error
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _clear(folder: Path, existed: bool) -> None:
    """The folder was empty, or not there: all that is in it is ours."""
    if not existed:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in folder.iterdir():
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _write_tokenizer(
    model: PreTrainedModel, source: Path, target: Path, *, is_rm: bool, trust_remote_code: bool
) -> None:
    """Copies the tokenizer's files; a reward model's is written anew where it has to pad with another token."""
    copy_tokenizer(source, target)
    if not is_rm:
        return
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    text = model.config.get_text_config()
    keep_pad_apart(tokenizer, text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id])
    copied = AutoTokenizer.from_pretrained(target, trust_remote_code=trust_remote_code)
    if copied.pad_token != tokenizer.pad_token:
        tokenizer.save_pretrained(target)
    text.pad_token_id = tokenizer.pad_token_id
