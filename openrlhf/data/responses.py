"""Tokens of responses behind their prompts, and which of them the assistant wrote: the same for SFT and preferences."""

from __future__ import annotations

from typing import Any

from openrlhf.data.spans import encode_marked, mark_assistant
from openrlhf.data.templates import Messages, encode


def encode_response(
    tokenizer: Any, prompt: str, templated: bool, response: str, end: str
) -> tuple[list[int], list[bool]]:
    """Tokenises ``prompt`` as it is at inference, then the response, closed by ``end`` or else EOS.

    Args:
        templated: a chat template wrote the prompt, special tokens included.
        end: what the template ends a turn with; "" where it uses nothing.

    Returns: ids, and for each whether it belongs to the response.

    Raises: ValueError where nothing of the prompt becomes a token.
    """
    closing = end or tokenizer.eos_token or ""
    bare = response.rstrip()
    if any(token and bare.endswith(token) for token in (end, tokenizer.eos_token)):
        response, closing = bare, ""
    prompt_ids = encode(tokenizer, prompt, templated=templated)
    if not prompt_ids:
        raise ValueError(f"the tokenizer makes no token of the prompt {prompt[:40]!r}")
    ids = encode(tokenizer, prompt + response, templated=templated) if response else list(prompt_ids)
    if ids[: len(prompt_ids)] != prompt_ids:
        # The border falls inside a token. At inference the prompt stands alone, so it does here.
        ids = prompt_ids + encode(tokenizer, response, templated=True)
    ids += encode(tokenizer, closing, templated=True) if closing else []
    return ids, [False] * len(prompt_ids) + [True] * (len(ids) - len(prompt_ids))


def encode_conversation(tokenizer: Any, messages: Messages, *, first: int) -> tuple[list[int], list[bool]]:
    """Tokenises a conversation up to the last token of the assistant's last message.

    Args:
        messages: checked.
        first: number, from 0, of the message from which on the assistant's tokens are marked.

    Returns: ids, closed with EOS where the template itself ends no turn, and the marks.

    Raises: ValueError where what the assistant wrote cannot be found with certainty.
    """
    marked = mark_assistant(tokenizer, messages, first=first)
    ids, mask = encode_marked(tokenizer, marked.text, marked.spans)
    if True not in mask:
        raise ValueError("the chat template renders nothing of the assistant's messages")
    end = len(mask) - mask[::-1].index(True)
    ids, mask = ids[:end], mask[:end]
    if not marked.closed:
        append_eos(tokenizer, ids, mask)
    return ids, mask


def append_eos(tokenizer: Any, ids: list[int], mask: list[bool]) -> None:
    """Ends a row with EOS, as one more token, unless it has it."""
    if tokenizer.eos_token_id is not None and ids[-1] != tokenizer.eos_token_id:
        ids.append(tokenizer.eos_token_id)
        mask.append(True)


def without_end(response: Any, end: str) -> Any:
    """Returns: the response without the token that the template is about to write behind it."""
    if isinstance(response, str) and end and response.rstrip().endswith(end):
        return response.rstrip().removesuffix(end)
    return response


def text_of(value: Any, key: str | None) -> str:
    """Returns: the text of column ``key``.

    Raises: ValueError where it is none.
    """
    if not isinstance(value, str):
        raise ValueError(f"column {key!r}: expected text, found {type(value).__name__}")
    return value
