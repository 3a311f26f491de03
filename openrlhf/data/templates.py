"""The one way from a prompt to text and from text to tokens, for SFT, preferences, RL prompts and reward servers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jinja2

from openrlhf.config.checks_data import SLOT
from openrlhf.config.errors import ConfigError

# Stands in for a message's text where we ask what a template writes around it. Private-use characters: no template
# looks for them, no tokenizer or strip() treats them as blank.
PLACEHOLDER = "\ue0f0\ue0f1\ue0f0"

# What a chat template raises: by itself (raise_exception), or over messages that it does not expect.
RENDER_ERRORS = (jinja2.TemplateError, TypeError, KeyError, ValueError)

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Rendered:
    """Text ready to be tokenised.

    Attributes:
        text: what the model sees.
        templated: a chat template wrote it, special tokens included, so ``encode`` adds none.
    """

    text: str
    templated: bool


def render_prompt(
    tokenizer: Any, prompt: str | Messages, *, apply_chat_template: bool, input_template: str | None = None
) -> Rendered:
    """Renders a prompt so that the model's answer follows.

    With ``apply_chat_template`` a string becomes a user message, and a string that the template has already rendered
    is left alone; otherwise a string is put into ``input_template``, where there is one.

    Raises:
        ValueError: the prompt cannot be rendered; the message says why, without naming the row.
    """
    if not apply_chat_template:
        if isinstance(prompt, list):
            raise ValueError("the prompt is a list of messages, which --data.apply_chat_template would render")
        if not isinstance(prompt, str):
            raise ValueError(f"expected text, found {_kind(prompt)}")
        if not prompt.strip():
            raise ValueError("the prompt is empty")
        if input_template is None:
            return Rendered(prompt, templated=False)
        before, after = input_template.split(SLOT)
        return Rendered(before + prompt + after, templated=False)
    if isinstance(prompt, str) and prompt.strip():
        done = already_templated(tokenizer, prompt)
        if done is not None:
            return done
    messages = as_messages(prompt, role="user")
    if messages[-1]["role"] == "assistant":
        raise ValueError("the last message of the prompt is the assistant's, so that there is nothing to answer")
    return Rendered(render_messages(tokenizer, messages, add_generation_prompt=True), templated=True)


def encode(tokenizer: Any, text: str, *, templated: bool) -> list[int]:
    """Tokenises ``text``, with the tokenizer's BOS (if it uses one) exactly once where ``templated`` is False.

    No EOS is added, even by tokenizers that are set to: what follows a prompt is the answer.
    """
    ids = list(tokenizer(text, add_special_tokens=not templated, verbose=False)["input_ids"])
    if templated:
        return ids
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        del ids[0]
    if eos is not None and eos != bos and ids[-1:] == [eos]:
        written = text.endswith(tokenizer.eos_token)
        if not written or ids[-2:] == [eos, eos]:
            del ids[-1]
    return ids


def as_messages(value: Any, *, role: str) -> Messages:
    """Returns ``value`` as a checked list of messages; a string becomes one message of ``role``.

    Keys without a value are left out: Arrow gives every message of a column the keys of all, and a template may ask
    whether a key is there.

    Raises: ValueError without the row's name.
    """
    if isinstance(value, str):
        value = [{"role": role, "content": value}]
    if isinstance(value, dict):
        value = _rows_of_columns(value) or [value]
    if not isinstance(value, list):
        raise ValueError(f"expected text or a list of messages, found {_kind(value)}")
    if not value:
        raise ValueError("the list of messages is empty")
    return [_checked_message(number, message) for number, message in enumerate(value, start=1)]


def _rows_of_columns(value: dict[str, Any]) -> Messages | None:
    """Messages out of a dict of lists, which is how older Arrow data sets give a list of objects."""
    columns = list(value.values())
    if not all(isinstance(column, list) for column in columns) or len({len(column) for column in columns}) != 1:
        return None
    return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]


def _checked_message(number: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"message {number} is {_kind(message)}, not an object with role and content")
    if not isinstance(message.get("role"), str):
        raise ValueError(f"message {number} has no role (keys: {', '.join(map(str, message)) or 'none'})")
    kept = {key: value for key, value in message.items() if value is not None}
    if not set(kept) - {"role"}:
        raise ValueError(f"message {number} has no content (keys: {', '.join(map(str, message))})")
    content = kept.setdefault("content", "")
    if not isinstance(content, str | list):
        raise ValueError(f"the content of message {number} is {_kind(content)}, not text")
    if message["role"] == "user" and not (content.strip() if isinstance(content, str) else content):
        raise ValueError(f"message {number}, the user's, is empty")
    return kept


def render_messages(tokenizer: Any, messages: Messages, *, add_generation_prompt: bool = False) -> str:
    """Renders a conversation with the tokenizer's chat template.

    Raises: ConfigError without a chat template, ValueError with what the template complains of.
    """
    require_chat_template(tokenizer)
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except RENDER_ERRORS as error:
        raise ValueError(f"the chat template cannot render the conversation: {error}") from error


def require_chat_template(tokenizer: Any) -> None:
    """Raises: ConfigError where the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        raise ConfigError(
            f"--data.apply_chat_template needs a chat template, and the tokenizer of {tokenizer.name_or_path!r} has "
            f"none: give it one (fine-tuning has --data.tokenizer_chat_template), or use --data.input_template instead"
        )


def already_templated(tokenizer: Any, text: str) -> Rendered | None:
    """Returns: ``text`` as it is where the tokenizer's chat template has rendered it before; None where it has not.

    It counts as rendered where it begins as the template's output does and holds all the special tokens that the
    template writes after a user message; a template without special tokens is known by the words it writes.
    """
    require_chat_template(tokenizer)
    frame = _user_frame(tokenizer, tokenizer.get_chat_template())
    if frame is None:
        return None
    bos = tokenizer.bos_token or ""
    before, after = frame
    bare, has_bos = text.lstrip(), False
    if bos and bare.startswith(bos):
        bare, has_bos = bare.removeprefix(bos).lstrip(), True
    head = before.removeprefix(bos).lstrip() if bos else before.lstrip()
    needed = set(control_tokens(tokenizer).findall(after)) - {bos}
    first = control_tokens(tokenizer).match(head)
    lead = first.group() if first else head.strip()
    if not bare.startswith(lead):
        return None
    if needed:
        rendered = all(token in bare for token in needed)
    else:
        rendered = bool(after.strip()) and bare.rstrip().endswith(after.strip())
    if not rendered:
        return None
    # Rendered earlier and stripped of its BOS: the tokenizer then adds it, where it adds one at all.
    return Rendered(text, templated=has_bos or not (bos and before.startswith(bos)))


def control_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Returns: a pattern that finds the tokenizer's special tokens in text (its added tokens where none is special)."""
    return _control_tokens(tokenizer, len(tokenizer))


@lru_cache(maxsize=8)
def _control_tokens(tokenizer: Any, size: int) -> re.Pattern[str]:
    added = list(tokenizer.added_tokens_decoder.values())
    texts = {token.content for token in added if token.special} or {token.content for token in added}
    texts |= set(tokenizer.all_special_tokens)
    found = sorted((text for text in texts if text.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, found)) or r"(?!)")


@lru_cache(maxsize=8)
def _user_frame(tokenizer: Any, chat_template: str) -> tuple[str, str] | None:
    """Returns: what the template writes before and after a lone user message, or None where it refuses one."""
    try:
        text = render_messages(tokenizer, [{"role": "user", "content": PLACEHOLDER}], add_generation_prompt=True)
    except ValueError:
        return None
    before, found, after = text.partition(PLACEHOLDER)
    return (before, after) if found else None


def _kind(value: Any) -> str:
    names = {type(None): "null", dict: "an object", list: "a list", bool: "true or false", int: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")
