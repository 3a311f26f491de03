"""The files of a tokenizer, carried over as they are."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers.utils import cached_file

# What the tokenizers of transformers read beside a model, chat templates and code of their own included.
_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates",
    "tokenization_*.py",
)


def tokenizer_folder(path: str | Path) -> Path | None:
    """Returns: the folder in which the tokenizer files of a model stand, for a hub name the one in the cache; None
    where there are none. Loads nothing: a tokenizer of the hub has to be in the cache.
    """
    for name in ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json"):
        found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        if found is not None:
            return Path(found).parent
    return None


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies the files of a tokenizer byte by byte.

    Raises: OSError where they cannot be read or written.
    """
    target.mkdir(parents=True, exist_ok=True)
    for pattern in _PATTERNS:
        for path in sorted(source.glob(pattern)):
            if path.is_dir():
                shutil.copytree(path, target / path.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(path, target / path.name)
