"""Checks --vllm.extra against the arguments of the installed vLLM, whose source is read and not imported."""

from __future__ import annotations

import ast
import difflib
import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from openrlhf.config.errors import ConfigError

# Annotations that say all of what is allowed; others are left to vLLM.
_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "None": "null"}


def check_engine_arguments(extra: dict[str, Any]) -> None:
    """Raises ConfigError for a name that vLLM does not know, or a value of another type than the argument has."""
    if not extra:
        return
    known = engine_arguments()
    for name, value in extra.items():
        if known and name not in known:
            near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigError(f"--vllm.extra: vLLM has no engine argument {name!r}{hint}")
        allowed = known.get(name, "").split(" | ")
        if set(allowed) <= _WORDS.keys() and not _fits(value, allowed):
            wanted = " or ".join(_WORDS[word] for word in allowed)
            raise ConfigError(f"--vllm.extra: {name!r} is {value!r}; it takes {wanted}.")
    _check_amounts(extra)


def _check_amounts(extra: dict[str, Any]) -> None:
    """vLLM takes an unset cache for half of the memory, and counts below 1 until it fails far from here."""
    for name in ("kv_cache_memory_bytes", "max_num_seqs", "max_num_batched_tokens"):
        if name in extra and (not isinstance(extra[name], int) or extra[name] < 1):
            raise ConfigError(
                f"--vllm.extra: {name!r} is {extra[name]!r}; give a whole number above 0, or leave it out: the run "
                "then chooses one by what it samples."
            )


def _fits(value: Any, allowed: list[str]) -> bool:
    if value is None:
        return "None" in allowed
    # True is an int to Python.
    return any(
        isinstance(value, _TYPES[word]) and (word == "bool" or not isinstance(value, bool))
        for word in allowed
        if word in _TYPES
    )


@functools.cache
def engine_arguments() -> dict[str, str]:
    """Returns: names of vLLM's engine arguments with their types as written; empty where they cannot be found."""
    spec = find_spec("vllm")
    for folder in (spec and spec.submodule_search_locations) or ():
        source = Path(folder, "engine", "arg_utils.py")
        if source.is_file():
            return _fields(ast.parse(source.read_text(encoding="utf-8")))
    return {}


def _fields(tree: ast.Module) -> dict[str, str]:
    classes = [
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
    ]
    return {
        item.target.id: ast.unparse(item.annotation)
        for node in classes
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
