"""Rows that several processes prepare are those that one prepares."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal

import pytest

from openrlhf.config.notes import notes
from openrlhf.data.errors import DataError
from openrlhf.data.parallel import PART, prepared
from openrlhf.data.preference import PreferenceDataset, PreferenceFormat
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.sft import SFTDataset, SFTFormat
from openrlhf.data.sources import load_dataset_mix
from openrlhf.utils.errors import RunError
from tests.tiny_models import make_tokenizer
from tests.unit.config_args import SFT, built

ROWS = [
    {
        "input": f"{n} + {n}",
        "output": f"{2 * n} " * (1 + n % 9),
        "chosen": f"{n} yes",
        "rejected": f"{n} no" if n % 7 else f"{n} yes",
        "margin": n / 4,
    }
    for n in range(3 * PART + 5)
]
FORM = SFTFormat(output_key="output", apply_chat_template=True)
PAIRS = PreferenceFormat(margin=True)


@pytest.fixture
def rows_of(tmp_path):
    def write(rows):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_dataset_mix(str(tmp_path / "rows.jsonl"), None, split="train", max_samples=10**6, seed=0)

    return write


def test_processes_make_the_data_set_that_one_makes(rows_of):
    rows, tokenizer = rows_of(ROWS), make_tokenizer()
    one, several = (SFTDataset(rows, tokenizer, FORM, max_len=24, workers=count) for count in (0, 2))
    assert one.truncated == several.truncated > 0
    assert one.summary() == several.summary()
    for mine, theirs in zip(one, several, strict=True):
        assert mine.tokens == theirs.tokens and mine.loss_mask.equal(theirs.loss_mask)

    one, several = (PreferenceDataset(rows, tokenizer, PAIRS, max_len=24, workers=count) for count in (0, 2))
    assert one.equal == several.equal > 0
    for mine, theirs in zip(one, several, strict=True):
        assert (mine.chosen, mine.rejected, mine.margin) == (theirs.chosen, theirs.rejected, theirs.margin)
        assert (mine.source, mine.row) == (theirs.source, theirs.row)
        assert mine.chosen_mask.equal(theirs.chosen_mask) and mine.rejected_mask.equal(theirs.rejected_mask)

    one, several = (PromptDataset(rows, tokenizer, label_key="output", workers=count) for count in (0, 2))
    assert list(one) == list(several)


def test_the_first_of_several_bad_rows_is_named_and_no_process_is_left(rows_of):
    rows = [dict(row) for row in ROWS]
    for place in (2 * PART + 1, PART + 3, 3 * PART):
        del rows[place]["output"]
    with pytest.raises(DataError, match=f"rows.jsonl, row {PART + 4}: there is no column 'output'"):
        SFTDataset(rows_of(rows), make_tokenizer(), FORM, max_len=24, workers=2)
    assert multiprocessing.active_children() == []


def test_a_process_that_is_killed_ends_the_run_with_a_sentence(rows_of):
    main = os.getpid()

    def die_at_the_last(row):
        if row["__row__"] == len(ROWS):
            assert os.getpid() != main
            os.kill(os.getpid(), signal.SIGKILL)
        return row["__row__"]

    found = []
    with pytest.raises(RunError, match="was killed, perhaps for memory: take fewer --data.dataloader_num_workers"):
        found.extend(prepared(rows_of(ROWS), die_at_the_last, 2))
    assert multiprocessing.active_children() == []


def test_processes_are_said_to_have_no_effect_where_rows_are_tokenised_in_their_turn():
    said = notes(built("train_sft", SFT, "--data.dataloader_num_workers", "2", "--data.streaming"))
    assert [note for note in said if "--data.dataloader_num_workers has no effect under --data.streaming" in note]
    assert notes(built("train_sft", SFT, "--data.dataloader_num_workers", "2")) == []
