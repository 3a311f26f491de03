"""Rows of supervised fine-tuning: tokens, and which of them are trained."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from openrlhf.config.checks_data import check_response, check_slots
from openrlhf.config.errors import ConfigError
from openrlhf.data.errors import DataError, NothingLeft
from openrlhf.data.parallel import prepared
from openrlhf.data.responses import append_eos, encode_conversation, encode_response, text_of, without_end
from openrlhf.data.rows import Rows, nothing_in, required_field, row_error
from openrlhf.data.spans import turn_end
from openrlhf.data.tables import Row
from openrlhf.data.templates import (
    already_templated,
    as_messages,
    encode,
    render_messages,
    render_prompt,
    require_chat_template,
)


@dataclass(frozen=True)
class SFTRecord:
    """One row.

    Attributes:
        tokens: ids.
        loss_mask: bool [len(tokens)], aligned to the tokens: True where the token is a target. False at the first.
    """

    tokens: list[int]
    loss_mask: torch.BoolTensor


@dataclass(frozen=True)
class SFTFormat:
    """How a row becomes text; each field is the flag of its name.

    Attributes:
        input_key: column of the prompt, or of the whole conversation.
        output_key: column of the response; None where the conversation holds it.
        input_template: text with one slot for prompts that are not rendered by a chat template.
        apply_chat_template: render with the tokenizer's chat template.
        multiturn: train on every assistant turn, not on the response alone.
        pretrain_mode: the input column is plain text (or a conversation), all of which is trained.
    """

    input_key: str = "input"
    output_key: str | None = None
    input_template: str | None = None
    apply_chat_template: bool = False
    multiturn: bool = False
    pretrain_mode: bool = False

    def __post_init__(self) -> None:
        """Raises: ConfigError for a combination that means nothing."""
        if self.input_template is not None:
            check_slots(self.input_template)
        check_response(
            self.output_key, chat=self.apply_chat_template, multiturn=self.multiturn, pretrain=self.pretrain_mode
        )


def encode_sft_row(tokenizer: Any, row: Row, form: SFTFormat) -> tuple[list[int], list[bool]]:
    """Tokenises one row without a limit on its length.

    Returns: ids and the mask of trained tokens, with nothing untrained after the last of them.

    Raises: DataError that names the row.
    """
    value = required_field(row, form.input_key, "--data.input_key")
    response = None
    if form.output_key is not None:
        response = required_field(row, form.output_key, "--data.output_key")
        nothing = nothing_in(row, form.output_key)
        if nothing is not None:
            raise row_error(row, f"column {form.output_key!r}: expected a response, found {nothing}")
    try:
        if form.pretrain_mode:
            ids, mask = _encode_whole(tokenizer, value, response, form)
        elif form.apply_chat_template:
            ids, mask = _encode_chat(tokenizer, value, response, form)
        else:
            ids, mask = _encode_text(tokenizer, value, response, form)
    except DataError:
        raise
    except ConfigError:
        raise
    except ValueError as error:
        raise row_error(row, str(error)) from error
    mask[0] = False
    return ids, mask


def _encode_text(tokenizer: Any, prompt: Any, response: Any, form: SFTFormat) -> tuple[list[int], list[bool]]:
    """Prompt in its template, then the response and EOS."""
    rendered = render_prompt(
        tokenizer, prompt, apply_chat_template=form.apply_chat_template, input_template=form.input_template
    )
    end = turn_end(tokenizer) if form.apply_chat_template else ""
    return encode_response(tokenizer, rendered.text, rendered.templated, text_of(response, form.output_key), end)


def _encode_chat(tokenizer: Any, value: Any, response: Any, form: SFTFormat) -> tuple[list[int], list[bool]]:
    """A conversation, of which every assistant turn is trained (multi-turn), or the response alone."""
    if isinstance(value, str) and response is not None and already_templated(tokenizer, value) is not None:
        return _encode_text(tokenizer, value, response, form)
    messages = as_messages(value, role="user")
    first = len(messages) - 1
    if response is not None:
        first = len(messages)
        messages += as_messages(without_end(response, turn_end(tokenizer)), role="assistant")
    elif messages[-1]["role"] != "assistant" and not form.multiturn:
        raise ValueError(
            "the last message is not the assistant's, so that there is no response; --data.output_key names the "
            "column of the response where it stands apart, --data.multiturn trains on earlier turns"
        )
    return encode_conversation(tokenizer, messages, first=0 if form.multiturn else first)


def _encode_whole(tokenizer: Any, value: Any, response: Any, form: SFTFormat) -> tuple[list[int], list[bool]]:
    """Plain text (or a whole conversation) with EOS, all of it trained."""
    if form.apply_chat_template and not isinstance(value, str):
        messages = as_messages(value, role="user")
        messages += as_messages(response, role="assistant") if response is not None else []
        ids = encode(tokenizer, render_messages(tokenizer, messages), templated=True)
        marker = None
    else:
        text = text_of(value, form.input_key) + ("" if response is None else text_of(response, form.output_key))
        if not text.strip():
            raise ValueError("the text is empty")
        ids = encode(tokenizer, text, templated=False)
        marker = tokenizer.eos_token_id
    if not ids:
        raise ValueError("the tokenizer makes no token of the text")
    mask = [True] * len(ids)
    if marker is not None:
        append_eos(tokenizer, ids, mask)
    return ids, mask


def _encode_compactly(tokenizer: Any, form: SFTFormat, row: Row) -> tuple[array, bytes]:
    """A row's ids and mask as they travel between processes."""
    ids, mask = encode_sft_row(tokenizer, row, form)
    return array("i", ids), bytes(mask)


class SFTDataset:
    """Rows tokenised once, at the start, and kept as flat arrays (5 bytes a token).

    Attributes:
        truncated: rows that were cut at ``max_len``.
        dropped: rows of which nothing trained was left after that; they are not in the data set.
    """

    def __init__(
        self,
        rows: Rows,
        tokenizer: Any,
        form: SFTFormat,
        *,
        max_len: int,
        progress: bool = False,
        workers: int = 0,
    ) -> None:
        """Tokenises all rows.

        Args:
            rows: what ``sources.load_dataset_mix`` returned.
            max_len: tokens that a row may have; what goes beyond is cut off.
            progress: show a progress bar, if there is a terminal.
            workers: processes that tokenise; 0 does it in this one.

        Raises:
            ConfigError: the settings cannot be used.
            DataError: a row cannot be used (it names file, row number and columns), or no row is left.
        """
        if max_len < 2:
            raise ConfigError(f"--data.max_len {max_len} leaves no room for a prompt and a response: give at least 2")
        if form.apply_chat_template:
            require_chat_template(tokenizer)
        self.max_len = max_len
        self.truncated = 0
        self.dropped = 0
        tokens, masks, ends = array("i"), bytearray(), array("q", [0])
        encoded = prepared(rows, partial(_encode_compactly, tokenizer, form), workers)
        for ids, mask in tqdm(encoded, "tokenising", len(rows), disable=None if progress else True, leave=False):
            self.truncated += len(ids) > max_len
            ids, mask = ids[:max_len], mask[:max_len]
            if True not in mask:
                self.dropped += 1
                continue
            tokens.extend(ids)
            masks.extend(mask)
            ends.append(len(tokens))
        self._tokens = np.frombuffer(tokens, dtype=np.int32) if len(tokens) else np.zeros(0, dtype=np.int32)
        self._masks = np.frombuffer(masks, dtype=np.bool_) if len(masks) else np.zeros(0, dtype=np.bool_)
        self._ends = np.asarray(ends, dtype=np.int64)
        if not len(self):
            raise NothingLeft(
                f"none of the {len(rows)} rows has a trained token within --data.max_len {max_len}: raise it",
                source=rows.locate(0)[0],
            )

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def left_out(self) -> int:
        """Rows that were given and are not in the data set."""
        return self.dropped

    def __getitem__(self, index: int) -> SFTRecord:
        """Raises: IndexError past the end."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start, stop = self._ends[index], self._ends[index + 1]
        mask = torch.from_numpy(self._masks[start:stop].copy())
        return SFTRecord(self._tokens[start:stop].tolist(), mask)

    def __iter__(self) -> Iterator[SFTRecord]:
        return (self[index] for index in range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        """Returns: int64 [rows], tokens of each row."""
        return np.diff(self._ends)

    @property
    def trained_tokens(self) -> np.ndarray:
        """Returns: int64 [rows], trained tokens of each row."""
        return np.add.reduceat(self._masks, self._ends[:-1], dtype=np.int64)

    @property
    def largest_token(self) -> int:
        """The largest id in the data."""
        return int(self._tokens.max())

    def summary(self) -> str:
        """Returns: one line on rows, tokens, and what was cut."""
        line = f"{len(self)} rows, {len(self._tokens)} tokens, {int(self._masks.sum())} of them trained"
        if self.truncated:
            line += f"; {self.truncated} rows were cut at --data.max_len {self.max_len}"
        if self.dropped:
            line += f", {self.dropped} of them left out because nothing of the response remained"
        return line
