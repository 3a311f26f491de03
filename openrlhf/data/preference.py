"""Pairs of responses to one prompt, of which one was preferred: for reward models and DPO."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from openrlhf.config.checks_data import check_pair_columns, check_slots
from openrlhf.config.errors import ConfigError
from openrlhf.data.errors import DataError, NothingLeft
from openrlhf.data.parallel import prepared
from openrlhf.data.responses import append_eos, encode_conversation, encode_response, text_of, without_end
from openrlhf.data.rows import Rows, nothing_in, required_field, row_error
from openrlhf.data.spans import turn_end
from openrlhf.data.tables import Row
from openrlhf.data.templates import (
    Messages,
    already_templated,
    as_messages,
    encode,
    render_prompt,
    require_chat_template,
)

MARGIN = "margin"

Encoded = tuple[list[int], list[bool]]


@dataclass(frozen=True)
class PreferenceRecord:
    """One pair.

    Attributes:
        chosen: ids of the whole better row, prompt and response.
        rejected: ids of the whole worse row.
        chosen_mask: bool [len(chosen)], aligned to the tokens: True where a token belongs to the response. False at the
            first.
        rejected_mask: bool [len(rejected)], likewise.
        margin: by how much the better response should win; 0 where margins are not read.
        source: the file or data set that the pair came from.
        row: its number there, from 1.
    """

    chosen: list[int]
    rejected: list[int]
    chosen_mask: torch.BoolTensor
    rejected_mask: torch.BoolTensor
    margin: float
    source: str
    row: int


@dataclass(frozen=True)
class PreferenceFormat:
    """How a row becomes two texts.

    Attributes:
        prompt_key: column of the prompt; None where both responses contain it.
        chosen_key: column of the better response.
        rejected_key: column of the worse response.
        input_template: text with one slot for prompts that are not rendered by a chat template.
        apply_chat_template: render with the tokenizer's chat template.
        margin: every row has a number in the column ``margin``.
    """

    prompt_key: str | None = None
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    input_template: str | None = None
    apply_chat_template: bool = False
    margin: bool = False

    def __post_init__(self) -> None:
        """Raises: ConfigError for a combination that means nothing."""
        if self.input_template is not None:
            check_slots(self.input_template)
        check_pair_columns(self.prompt_key, self.chosen_key, self.rejected_key)


def encode_pair(tokenizer: Any, row: Row, form: PreferenceFormat) -> tuple[Encoded, Encoded]:
    """Tokenises both rows of a pair without a limit on their length.

    Every row ends with the response's last token: the one with which the chat template ends a turn, else EOS, put there
    where the text does not have it.

    Returns: ids and marks of the response's tokens, of the chosen row and of the rejected one.

    Raises: DataError that names the row.
    """
    if form.prompt_key is not None:
        required_field(row, form.prompt_key, "--data.prompt_key")
    columns = ((form.chosen_key, "--data.chosen_key"), (form.rejected_key, "--data.rejected_key"))
    for key, flag in columns:
        required_field(row, key, flag)
        nothing = nothing_in(row, key)
        if nothing is not None:
            raise row_error(row, f"column {key!r}: expected a response, found {nothing}")
    try:
        if form.prompt_key is None:
            pair = _without_prompt(tokenizer, row, form)
        else:
            pair = tuple(_behind_prompt(tokenizer, row, key, form) for key, _ in columns)
    except (DataError, ConfigError):
        raise
    except ValueError as error:
        raise row_error(row, str(error)) from error
    for _, mask in pair:
        mask[0] = False
    return pair


def _behind_prompt(tokenizer: Any, row: Row, key: str, form: PreferenceFormat) -> Encoded:
    """A response whose prompt stands in a column of its own."""
    prompt, response = row[form.prompt_key], row[key]
    chat = form.apply_chat_template
    templated = chat and isinstance(prompt, str) and already_templated(tokenizer, prompt) is not None
    if not chat or (templated and isinstance(response, str)):
        rendered = render_prompt(tokenizer, prompt, apply_chat_template=chat, input_template=form.input_template)
        end = turn_end(tokenizer) if chat else ""
        return encode_response(tokenizer, rendered.text, rendered.templated, _text(response, key), end)
    before = as_messages(prompt, role="user")
    with _naming(key):
        after = as_messages(without_end(response, turn_end(tokenizer)), role="assistant")
    if after[: len(before)] == before:
        # Many data sets name the prompt and repeat it in both conversations.
        after = after[len(before) :]
    elif after[0]["role"] in ("system", "user") and before[-1]["role"] != "assistant":
        raise ValueError(
            f"column {key!r} begins with a message of the {after[0]['role']}'s that is not the prompt of column "
            f"{form.prompt_key!r}; leave out --data.prompt_key where both responses hold the whole conversation"
        )
    return _conversation(tokenizer, before + after, len(before), key)


def _without_prompt(tokenizer: Any, row: Row, form: PreferenceFormat) -> tuple[Encoded, Encoded]:
    """Two rows that contain their prompt: it is what they share at the beginning."""
    keys = (form.chosen_key, form.rejected_key)
    texts = [isinstance(row[key], str) for key in keys]
    if not form.apply_chat_template or all(texts):
        return _behind_shared_tokens(*(_encode_whole(tokenizer, row[key], key, form) for key in keys))
    for key, is_text in zip(keys, texts, strict=True):
        if is_text:
            raise ValueError(f"column {key!r} is text where the other response is a list of messages")
    talks = []
    for key in keys:
        with _naming(key):
            talks.append(as_messages(row[key], role="user"))
    shared = _shared(*talks)
    chosen, rejected = (_conversation(tokenizer, talk, shared, key) for talk, key in zip(talks, keys, strict=True))
    return chosen, rejected


def _encode_whole(tokenizer: Any, value: Any, key: str, form: PreferenceFormat) -> list[int]:
    """Tokens of a text that holds prompt and response, closed as a response is."""
    text, templated, end = _text(value, key), False, ""
    if not text.strip():
        raise ValueError(f"column {key!r}: the text is empty")
    if form.apply_chat_template:
        done = already_templated(tokenizer, text)
        if done is None:
            raise ValueError(
                f"column {key!r} is text that the chat template has not rendered, so that nothing tells prompt and "
                "response apart; give lists of messages, name the prompt's column with --data.prompt_key, or leave out "
                "--data.apply_chat_template"
            )
        templated, end = done.templated, turn_end(tokenizer)
    bare = text.rstrip()
    closed = any(token and bare.endswith(token) for token in (end, tokenizer.eos_token))
    ids = encode(tokenizer, bare if closed else text, templated=templated)
    if not ids:
        raise ValueError(f"column {key!r}: the tokenizer makes no token of the text")
    if not closed:
        if end:
            ids += encode(tokenizer, end, templated=True)
        else:
            append_eos(tokenizer, ids, [])
    return ids


def _behind_shared_tokens(chosen: list[int], rejected: list[int]) -> tuple[Encoded, Encoded]:
    """Marks what follows the tokens that two rows share, the last token of each at least."""
    prompt = _shared(chosen, rejected)
    masks = ([False] * prompt + [True] * (len(ids) - prompt) for ids in (chosen, rejected))
    return (chosen, next(masks)), (rejected, next(masks))


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Returns: how many first entries are equal, less than all of either."""
    longest = min(len(one), len(other)) - 1
    return next((place for place in range(longest) if one[place] != other[place]), max(longest, 0))


def _conversation(tokenizer: Any, messages: Messages, first: int, key: str) -> Encoded:
    with _naming(key):
        if len(messages) <= first or messages[-1]["role"] != "assistant":
            raise ValueError("the last message is not the assistant's, so that there is no response")
        return encode_conversation(tokenizer, messages, first=first)


def _text(value: Any, key: str) -> str:
    if isinstance(value, list):
        raise ValueError(f"column {key!r} is a list of messages, which --data.apply_chat_template would render")
    return text_of(value, key)


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """Puts the column's name before the sentence of a ValueError."""
    try:
        yield
    except (DataError, ConfigError):
        raise
    except ValueError as error:
        raise ValueError(f"column {key!r}: {error}") from error


def margin_of(row: Row) -> float:
    """Returns: the number in the column ``margin``.

    Raises: DataError that names the row.
    """
    value = required_field(row, MARGIN, "--model.margin_loss_enable")
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise row_error(
            row, f"column {MARGIN!r}: expected a number for --model.margin_loss_enable (0 for none), found {value!r}"
        )
    return number


def _encode_compactly(
    tokenizer: Any, form: PreferenceFormat, row: Row
) -> tuple[list[tuple[array, bytes]], float, tuple[str, int]]:
    """A pair as it travels between processes: ids and marks of both rows, the margin, and the row's place."""
    pair = [(array("i", ids), bytes(mask)) for ids, mask in encode_pair(tokenizer, row, form)]
    return pair, margin_of(row) if form.margin else 0.0, (row["__source__"], row["__row__"])


class PreferenceDataset:
    """Pairs tokenised once, at the start, and kept as flat arrays (5 bytes a token).

    Attributes:
        truncated: pairs of which a row was cut at ``max_len``.
        dropped: pairs left out because nothing of a response was left after that.
        equal: pairs left out because both rows hold the same tokens, from which nothing can be learned.
    """

    def __init__(
        self,
        rows: Rows,
        tokenizer: Any,
        form: PreferenceFormat,
        *,
        max_len: int,
        progress: bool = False,
        workers: int = 0,
    ) -> None:
        """Tokenises all rows.

        Args:
            rows: what ``sources.load_dataset_mix`` returned.
            max_len: tokens that each row of a pair may have; what goes beyond is cut off.
            progress: show a progress bar, if there is a terminal.
            workers: processes that tokenise; 0 does it in this one.

        Raises:
            ConfigError: the settings cannot be used.
            DataError: a row cannot be used (it names file, row number and columns), or no pair is left.
        """
        if max_len < 2:
            raise ConfigError(f"--data.max_len {max_len} leaves no room for a prompt and a response: give at least 2")
        if form.apply_chat_template:
            require_chat_template(tokenizer)
        self.max_len = max_len
        self.truncated = self.dropped = self.equal = 0
        tokens, masks, ends = array("i"), bytearray(), array("q", [0])
        margins, places = array("d"), []
        encoded = prepared(rows, partial(_encode_compactly, tokenizer, form), workers)
        bar = tqdm(encoded, "tokenising", len(rows), disable=None if progress else True, leave=False)
        for pair, margin, place in bar:
            self.truncated += max(len(ids) for ids, _ in pair) > max_len
            pair = [(ids[:max_len], mask[:max_len]) for ids, mask in pair]
            if not self._keeps(pair):
                continue
            for ids, mask in pair:
                tokens.extend(ids)
                masks.extend(mask)
                ends.append(len(tokens))
            margins.append(margin)
            places.append(place)
        self._tokens = np.asarray(tokens, dtype=np.int32)
        self._masks = np.frombuffer(masks, dtype=np.bool_) if len(masks) else np.zeros(0, dtype=np.bool_)
        self._ends = np.asarray(ends, dtype=np.int64)
        self._margins = margins
        self._places = places
        if not len(self):
            raise NothingLeft(
                f"none of the {len(rows)} pairs can be used: in {self.dropped} nothing of a response lies within "
                f"--data.max_len {max_len}, in {self.equal} chosen and rejected are the same",
                source=rows.locate(0)[0],
            )

    def _keeps(self, pair: Sequence[tuple[array, bytes]]) -> bool:
        """Returns: whether something can be learned from a pair; what cannot is counted."""
        (chosen, chosen_mask), (rejected, rejected_mask) = pair
        if True not in chosen_mask or True not in rejected_mask:
            self.dropped += 1
        elif chosen == rejected:
            self.equal += 1
        else:
            return True
        return False

    def __len__(self) -> int:
        return len(self._margins)

    @property
    def left_out(self) -> int:
        """Pairs that were given and are not in the data set."""
        return self.dropped + self.equal

    def __getitem__(self, index: int) -> PreferenceRecord:
        """Raises: IndexError past the end."""
        if not 0 <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        start, middle, stop = (int(end) for end in self._ends[2 * index : 2 * index + 3])
        source, row = self._places[index]
        return PreferenceRecord(
            chosen=self._tokens[start:middle].tolist(),
            rejected=self._tokens[middle:stop].tolist(),
            chosen_mask=torch.from_numpy(self._masks[start:middle].copy()),
            rejected_mask=torch.from_numpy(self._masks[middle:stop].copy()),
            margin=self._margins[index],
            source=source,
            row=row,
        )

    def __iter__(self) -> Iterator[PreferenceRecord]:
        return (self[index] for index in range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        """Returns: int64 [pairs], tokens of both rows of each pair together."""
        return np.diff(self._ends[::2])

    def row_lengths(self, pairs: Sequence[int]) -> list[int]:
        """Returns: [2K], tokens of the chosen and the rejected row of K pairs."""
        return np.diff(self._ends).reshape(-1, 2)[list(pairs)].flatten().tolist()

    @property
    def largest_token(self) -> int:
        """The largest id in the data."""
        return int(self._tokens.max())

    def summary(self) -> str:
        """Returns: one line on pairs, tokens, and what was cut or left out."""
        line = f"{len(self)} pairs, {len(self._tokens)} tokens, {int(self._masks.sum())} of them in responses"
        if self.truncated:
            line += f"; {self.truncated} pairs were cut at --data.max_len {self.max_len}"
        if self.dropped:
            line += f"; {self.dropped} left out because nothing of a response remained"
        if self.equal:
            line += f"; {self.equal} left out because chosen and rejected are the same"
        return line
