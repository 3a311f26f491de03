"""From words on a command line and lines of a YAML file to settings: which flag, which values, where they stood."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf.config.aliases import PROMPT_MAX_LEN, canonical, is_group
from openrlhf.config.errors import ConfigError
from openrlhf.config.flags import Flag


@dataclass(frozen=True)
class Setting:
    """One flag that was given.

    Attributes:
        name: the flag, or ``PROMPT_MAX_LEN``.
        words: its values as text; for a bool "True" or "False".
        written: the name as it was written, dashes and underscores as in the flag.
        origin: how a message names it: ``--train.batch_size``, or ``run.yaml: train.batch_size``.
    """

    name: str
    words: list[str]
    written: str
    origin: str


_TEXT = "tag:yaml.org,2002:str"
_PROMPT_MAX_LEN_FLAG = Flag(PROMPT_MAX_LEN, (), int, None, None, (), False)


def lookup(name: str, flags: Mapping[str, Flag], origin: str) -> tuple[Flag, bool]:
    """Finds a flag by any of its names.

    Returns: the flag, and False where the name is the negative one of a bool.

    Raises: ConfigError with the nearest names.
    """
    if name == PROMPT_MAX_LEN and "rollout.max_new_tokens" in flags:
        return _PROMPT_MAX_LEN_FLAG, True
    found = canonical(name, flags)
    if found is not None:
        return flags[found], True
    group, _, leaf = name.rpartition(".")
    if leaf.startswith("no_"):
        positive = f"{group}.{leaf[3:]}" if group else leaf[3:]
        found = canonical(positive, flags)
        if found is not None and flags[found].kind is bool:
            return flags[found], False
    like = nearest(name, flags)
    hint = f"nearest: {', '.join(like)}" if like else "no flag has a name like it, and --help lists them all"
    raise ConfigError(f"Unknown flag {origin}; {hint}.")


def nearest(name: str, flags: Mapping[str, Flag]) -> list[str]:
    """Returns: up to three flags with dashes whose names are most like ``name``; none where no name is like it."""
    leaf = name.rpartition(".")[2]
    same_leaf = [flag for flag in flags if flag.rpartition(".")[2] == leaf]
    by_leaf = {flag.rpartition(".")[2]: flag for flag in reversed(flags)}
    like = difflib.get_close_matches(name, flags, n=3, cutoff=0.5)
    like_leaf = [by_leaf[close] for close in difflib.get_close_matches(leaf, by_leaf, n=2, cutoff=0.7)]
    found = sorted({*same_leaf, *like_leaf, *like}, key=lambda flag: -difflib.SequenceMatcher(None, name, flag).ratio())
    return [f"--{flag}" for flag in found[:3]]


def from_words(words: Sequence[str], flags: Mapping[str, Flag]) -> list[Setting]:
    """Reads a command line.

    Args:
        words: as the shell splits them; ``--flag=value`` and hyphens in names are understood.
        flags: the flags of the command.
    """
    settings = []
    flag: Flag | None = None
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            if flag is None:
                raise ConfigError(f"{word!r} is not a flag; flags start with two dashes.")
            raise ConfigError(f"{word!r} follows {settings[-1].origin}, which takes {flag.arity}.")
        written, equals, value = word[2:].partition("=")
        written = written.replace("-", "_")
        origin = f"--{written}"
        flag, positive = lookup(written, flags, origin)
        values = [value] if equals else []
        if flag.kind is bool:
            values = [_truth(values, positive, origin)]
        else:
            wanted = len(rest) if flag.nargs == "*" else (flag.nargs or 1) - len(values)
            while wanted > 0 and rest and not rest[0].startswith("--"):
                values.append(rest.pop(0))
                wanted -= 1
            if not values:
                hint = f" (a value that starts with dashes is written {origin}=VALUE)" if rest else ""
                raise ConfigError(f"{origin} needs a value{hint}.")
            flag.check_words(values, origin)
        settings.append(Setting(flag.name, values, written, origin))
    return settings


def _truth(values: list[str], positive: bool, origin: str) -> str:
    """Returns: "True" or "False" for a bool that was written with or without ``=true``."""
    if not values:
        return str(positive)
    if values[0].lower() not in ("true", "false"):
        raise ConfigError(f"{origin} is on or off and takes true or false after the equals sign, found {values[0]!r}.")
    return str((values[0].lower() == "true") == positive)


def from_yaml(file: str, flags: Mapping[str, Flag]) -> list[Setting]:
    """Reads a YAML file with nested or dotted flag names.

    Raises: ConfigError that names the file and the key.
    """
    import yaml

    try:
        tree = yaml.load(Path(file).read_text(encoding="utf-8"), Loader=_strict_loader())
    except OSError as error:
        raise ConfigError(f"--config {file}: cannot be read ({error.strerror}).") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file} is not valid YAML: {' '.join(str(error).split())}.") from None
    if tree is None:
        return []
    if not isinstance(tree, dict):
        raise ConfigError(f"--config {file} must map flag names to values, found {type(tree).__name__} at the top.")
    settings = list(_yaml_items(tree, "", file, flags))
    seen: dict[str, Setting] = {}
    for setting in settings:
        if setting.name in seen:
            other = seen[setting.name].written
            raise ConfigError(f"{setting.origin} and {other} in the same file are the same flag; keep one.")
        seen[setting.name] = setting
    return settings


def _strict_loader() -> type:
    """Returns: a safe YAML loader that refuses a key given twice, of which YAML would silently keep the last."""
    import yaml

    class Loader(yaml.SafeLoader):
        # YAML 1.1 reads 3:5 as a number to the base of 60, that is 185; since YAML 1.2 it is text.
        yaml_implicit_resolvers = {
            start: [(_TEXT, re.compile(r"\d+:\d+$"))] * start.isdigit() + resolvers
            for start, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node, deep=False):
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for i, key in enumerate(keys):
                if key in keys[:i]:
                    raise yaml.YAMLError(f"line {node.value[i][0].start_mark.line + 1}: key {key!r} stands twice")
            return super().construct_mapping(node, deep)

    return Loader


def _yaml_items(tree: dict, prefix: str, file: str, flags: Mapping[str, Flag]):
    for key, value in tree.items():
        name = f"{prefix}{key}".replace("-", "_")
        origin = f"{file}: {name}"
        if name not in flags and is_group(name, flags) and isinstance(value, dict | None):
            yield from _yaml_items(value or {}, f"{name}.", file, flags)
            continue
        flag, positive = lookup(name, flags, origin)
        if flag.name == "config":
            raise ConfigError(f"{origin}: a config file cannot name another one.")
        yield Setting(flag.name, _yaml_words(flag, value, positive, origin), name, origin)


def _yaml_words(flag: Flag, value: Any, positive: bool, origin: str) -> list[str]:
    """Returns: a YAML value as the words that a command line would have."""
    if flag.kind is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{origin} takes true or false, found {value!r}.")
        return [str(value == positive)]
    if isinstance(value, list) != (flag.nargs is not None) and value is not None:
        if flag.nargs != "*":
            raise ConfigError(
                f"{origin} takes {f'a list of {flag.nargs}' if flag.nargs else 'one value'}, found {value!r}."
            )
    if isinstance(value, bool):
        flag.check_words([str(value)], origin)
        raise ConfigError(
            f"{origin} takes text, found {value!r}, as YAML reads true, yes and on and their opposites; where the word "
            "itself is meant, write it in quotes."
        )
    items = value if isinstance(value, list) else [value]
    words = [json.dumps(item) if isinstance(item, dict) else str(item) for item in items]
    flag.check_words(words, origin)
    if value is None and not flag.optional:
        raise ConfigError(f"{origin} needs a value.")
    return words
