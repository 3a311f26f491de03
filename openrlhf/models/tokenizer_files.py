"""A tokenizer's files beside an exported model: those that it was loaded from, wherever nothing in them was changed."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

TOKENIZER_FILE = "tokenizer.json"
# Beside the vocabulary, whose files each class of tokenizers names itself.
SETTINGS_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
TEMPLATES_FOLDER = "additional_chat_templates"

# What the last call of a tokenizer leaves in the file that it writes; no property of the tokenizer.
_LEFT_BY_CALLS = ("padding", "truncation")


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Writes a tokenizer's files: byte for byte those of where it was loaded from, if it is still the same.

    Where something was changed (a pad token, the chat template), transformers writes the files, all but a
    ``tokenizer.json`` that the change does not touch. What is the same is found by loading the source once more and
    comparing what transformers writes of both.

    Raises: OSError where they cannot be written; a fast tokenizer has no type of its own for that.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="openrlhf-tokenizer-") as scratch:
            ours, fresh = Path(scratch) / "ours", Path(scratch) / "fresh"
            tokenizer.save_pretrained(ours)
            source = _source_files(tokenizer)
            if source and _save_again(tokenizer, fresh):
                _take_over(source, ours, fresh)
            _copy(ours, folder)
    except OSError:
        raise
    except Exception as error:
        raise OSError(str(error)) from error


def _source_files(tokenizer: Any) -> dict[str, Path]:
    """By name, the files that the tokenizer was loaded from: of a folder, or of the hub's cache."""
    source = str(tokenizer.name_or_path)
    names = dict.fromkeys([TOKENIZER_FILE, *SETTINGS_FILES, *tokenizer.vocab_files_names.values()])
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    try:
        found = {name: cached_file(source, name, local_files_only=True, **quiet) for name in names} if source else {}
    except OSError:  # gone since it was loaded, or never there: made by a program
        return {}
    return {name: Path(path) for name, path in found.items() if path is not None}


def _save_again(tokenizer: Any, folder: Path) -> bool:
    """Writes what the source of a tokenizer gives now. Returns: whether it can be loaded like that."""
    try:
        fresh = type(tokenizer).from_pretrained(tokenizer.name_or_path, local_files_only=True)
    except Exception:  # it was loaded before, perhaps in another way: then its files are written anew
        return False
    fresh.save_pretrained(folder)
    return True


def _take_over(source: dict[str, Path], ours: Path, fresh: Path) -> None:
    """Puts files of the source in the place of those in ``ours`` that say the same."""
    written = {path.relative_to(ours): _content(path) for path in ours.rglob("*") if path.is_file()}
    again = {path.relative_to(fresh): _content(path) for path in fresh.rglob("*") if path.is_file()}
    whole = written == again and not (ours / TEMPLATES_FOLDER).exists()
    if whole:
        for path in written:
            # A tokenizer's own code is named by its settings, and is no file of theirs.
            if path.suffix != ".py":
                (ours / path).unlink()
    elif written.get(Path(TOKENIZER_FILE)) == again.get(Path(TOKENIZER_FILE)):
        source = {name: path for name, path in source.items() if name == TOKENIZER_FILE}
    else:
        return
    for name, path in source.items():
        shutil.copyfile(path, ours / name)


def _content(path: Path) -> Any:
    if path.name != TOKENIZER_FILE:
        return path.read_bytes()
    return {key: value for key, value in json.loads(path.read_bytes()).items() if key not in _LEFT_BY_CALLS}


def _copy(source: Path, target: Path) -> None:
    """Copies all files, and removes settings of an earlier tokenizer that this one does not have."""
    for name in SETTINGS_FILES:
        if not (source / name).exists():
            (target / name).unlink(missing_ok=True)
    shutil.copytree(source, target, dirs_exist_ok=True, copy_function=shutil.copyfile)
