"""The flags of a command as a table, read off its tree of dataclasses."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from openrlhf.config.errors import ConfigError


@dataclass(frozen=True)
class Secret:
    """Marks a field in its `Annotated` type: its value is never written anywhere, but for words that tell nothing.

    Attributes:
        plain: values that are no secrets.
    """

    plain: tuple[str, ...] = ()


@dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        name: dotted, without dashes: ``actor.adam.lr``.
        path: attributes that lead to the value from the command's config.
        kind: bool, int, float, str, or dict for a JSON object.
        nargs: None for one value (none for a bool), 2, or "*".
        default: the value when nothing is given.
        choices: allowed values, empty where any will do.
        optional: None is a value too.
        secret: what of its values may be written; None where all may.
    """

    name: str
    path: tuple[str, ...]
    kind: type
    nargs: int | str | None
    default: Any
    choices: tuple[str, ...]
    optional: bool
    secret: Secret | None = None

    @property
    def negative(self) -> str:
        """Name that sets a bool to False: ``actor.muon.no_nesterov``."""
        group, _, leaf = self.name.rpartition(".")
        return f"{group}.no_{leaf}" if group else f"no_{leaf}"

    @property
    def arity(self) -> str:
        """How many values it takes, in words."""
        if self.kind is bool:
            return "no value"
        return {None: "one value", "*": "any number of values"}.get(self.nargs, f"{self.nargs} values")

    def value(self, config: Any) -> Any:
        """Returns: what ``config`` holds for this flag."""
        return functools.reduce(getattr, self.path, config)

    def hides(self, value: Any) -> bool:
        """Returns: whether ``value`` must not be written to a file, a report or a server."""
        return self.secret is not None and bool(value) and value not in self.secret.plain

    def check_words(self, words: list[str], origin: str) -> None:
        """Raises ConfigError where ``words`` cannot be this flag's values; ``origin`` says where they stood."""
        if self.optional and words == ["None"]:
            return
        if isinstance(self.nargs, int) and len(words) != self.nargs:
            raise ConfigError(f"{origin} takes {self.nargs} values, found {len(words)}: {' '.join(words) or 'none'}.")
        for word in words:
            self._check_word(word, origin)

    def _check_word(self, word: str, origin: str) -> None:
        if self.choices and word not in self.choices:
            raise ConfigError(f"{origin} must be one of {', '.join(self.choices)}, found {word!r}.")
        wanted = {int: "a whole number", float: "a number", dict: "a JSON object"}.get(self.kind)
        try:
            value = json.loads(word) if self.kind is dict else self.kind(word)
        except ValueError:
            raise ConfigError(f"{origin} takes {wanted}, found {word!r}.") from None
        if self.kind is dict and not isinstance(value, dict):
            raise ConfigError(f"{origin} takes {wanted}, found {word!r}.")


@functools.cache
def flags_of(tree: type) -> dict[str, Flag]:
    """Returns: the flags of a config class by name, in the order of its fields."""
    return {flag.name: flag for flag in _walk(tree(), (), ())}


def _walk(group: Any, names: tuple[str, ...], path: tuple[str, ...]):
    hints = get_type_hints(type(group), include_extras=True)
    for field in dataclasses.fields(group):
        default = getattr(group, field.name)
        if dataclasses.is_dataclass(default):
            yield from _walk(default, names + _prefix(field.name, hints[field.name]), (*path, field.name))
        else:
            name = ".".join((*names, field.name))
            marks = get_args(hints[field.name]) if get_origin(hints[field.name]) is Annotated else ()
            secret = next((mark for mark in marks if isinstance(mark, Secret)), None)
            yield Flag(name, (*path, field.name), *_shape(hints[field.name], default), secret)


def _prefix(name: str, hint: Any) -> tuple[str, ...]:
    """A group marked with the empty name adds nothing to the names of its flags."""
    unnamed = get_origin(hint) is Annotated and any(getattr(mark, "name", None) == "" for mark in get_args(hint)[1:])
    return () if unnamed else (name,)


def _shape(hint: Any, default: Any) -> tuple[type, int | str | None, Any, tuple[str, ...], bool]:
    """Returns: kind, nargs, default, choices and optional of a field's type."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    optional = False
    if get_origin(hint) in (Union, types.UnionType):
        optional = True
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Literal:
        return str, None, default, get_args(hint), optional
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        return parts[0], "*" if parts[-1] is Ellipsis else len(parts), default, (), optional
    if get_origin(hint) is dict:
        return dict, None, default, (), optional
    return hint, None, default, (), optional
