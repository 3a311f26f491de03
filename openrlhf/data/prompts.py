"""Prompts of RL: what a policy is asked, and what its answer is judged by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from openrlhf.config.checks_data import check_slots
from openrlhf.data.errors import DataError
from openrlhf.data.parallel import prepared
from openrlhf.data.rows import Rows, required_field, row_error
from openrlhf.data.tables import Row
from openrlhf.data.templates import render_prompt, require_chat_template
from openrlhf.data.text import control_character


@dataclass(frozen=True)
class PromptRecord:
    """One prompt.

    Attributes:
        prompt: the text that the model answers, rendered.
        label: what the reward function gets, of whatever JSON type the data set holds; "" without a label column.
        datasource: the row's `datasource` column, which evaluation groups by; "default" without one.
        templated: ``prompt`` holds its special tokens (hand it to ``templates.encode`` with the text).
        images: the row's images, or None.
    """

    prompt: str
    label: Any
    datasource: str
    templated: bool
    images: Any = None


class PromptDataset:
    """Prompts rendered from the rows of a data set.

    Every row is rendered once at the start, so that a bad one stops the run then and not hours later; the texts are
    not kept, but rendered again when asked for.
    """

    def __init__(
        self,
        rows: Rows,
        tokenizer: Any,
        *,
        input_key: str = "input",
        label_key: str | None = None,
        input_template: str | None = None,
        apply_chat_template: bool = False,
        image_key: str | None = None,
        progress: bool = False,
        workers: int = 0,
    ) -> None:
        """Checks all rows.

        Args:
            rows: what ``sources.load_dataset_mix`` returned.
            image_key: column of images; None ignores images.
            progress: show a progress bar, if there is a terminal.
            workers: processes that check; 0 does it in this one.

        Raises:
            ConfigError: the template cannot be used.
            DataError: a row cannot be used; it names file, row number and columns.
        """
        if input_template is not None:
            check_slots(input_template)
        if apply_chat_template:
            require_chat_template(tokenizer)
        self.rows = rows
        self.tokenizer = tokenizer
        self.input_key = input_key
        self.label_key = label_key
        self.input_template = input_template
        self.apply_chat_template = apply_chat_template
        self.image_key = image_key
        checked = prepared(rows, self._check, workers)
        for _ in tqdm(checked, "checking prompts", len(rows), disable=None if progress else True, leave=False):
            pass

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> PromptRecord:
        """Raises: IndexError past the end."""
        row = self.rows[index]
        return self._record(row, None if self.image_key is None else row.get(self.image_key))

    def __iter__(self) -> Iterator[PromptRecord]:
        return (self[index] for index in range(len(self)))

    def _check(self, row: Row) -> None:
        self._record(row, images=None)

    def _record(self, row: Row, images: Any) -> PromptRecord:
        try:
            rendered = render_prompt(
                self.tokenizer,
                required_field(row, self.input_key, "--data.input_key"),
                apply_chat_template=self.apply_chat_template,
                input_template=self.input_template,
            )
        except DataError:
            raise
        except ValueError as error:
            raise row_error(row, f"column {self.input_key!r}: {error}") from error
        label = "" if self.label_key is None else required_field(row, self.label_key, "--data.label_key")
        return PromptRecord(rendered.text, label, _datasource(row), rendered.templated, images)


def _datasource(row: Row) -> str:
    """Raises: DataError where the row's name for its source could not stand in the name of a metric."""
    name = str(row.get("datasource") or "default")
    control = control_character(name)
    if control is not None:
        raise row_error(
            row,
            f"column 'datasource': {name!a:.60} holds {control}, and metrics are named by it: use plain text",
        )
    return name
