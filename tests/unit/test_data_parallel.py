"""Rows that several processes prepare are those that one prepares."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openrlhf.data.batching import split_updates
from openrlhf.data.errors import DataError
from openrlhf.data.parallel import PART, prepared
from openrlhf.data.preference import PreferenceDataset, PreferenceFormat
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.sampler import StatefulSampler
from openrlhf.data.sft import SFTDataset, SFTFormat
from openrlhf.data.sources import load_dataset_mix
from openrlhf.data.streaming import FIRST_ROWS, StreamedRows
from openrlhf.utils.errors import RunError
from tests.tiny_models import make_tokenizer

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
def others():
    """The processes that other tests of this one have left running."""
    return set(multiprocessing.active_children())


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


def test_the_first_of_several_bad_rows_is_named_and_no_process_is_left(rows_of, others):
    rows = [dict(row) for row in ROWS]
    for place in (2 * PART + 1, PART + 3, 3 * PART):
        del rows[place]["output"]
    with pytest.raises(DataError, match=f"rows.jsonl, row {PART + 4}: there is no column 'output'"):
        SFTDataset(rows_of(rows), make_tokenizer(), FORM, max_len=24, workers=2)
    assert set(multiprocessing.active_children()) <= others


def test_a_process_that_is_killed_ends_the_run_with_a_sentence(rows_of, others):
    main = os.getpid()

    def die_at_the_last(row):
        if row["__row__"] == len(ROWS):
            assert os.getpid() != main
            os.kill(os.getpid(), signal.SIGKILL)
        return row["__row__"]

    found = []
    with pytest.raises(RunError, match="was killed, perhaps for memory: take fewer --data.dataloader_num_workers"):
        found.extend(prepared(rows_of(ROWS), die_at_the_last, 2))
    assert set(multiprocessing.active_children()) <= others


HANGING = """
import os, sys, time
from openrlhf.data.parallel import ForkedPool
def show(argument):
    print(os.getpid(), flush=True)
pool = ForkedPool(show, 2)
pool.result(pool.submit(0))
os.kill(os.getpid(), 9)
"""


def test_processes_end_with_a_main_process_that_is_killed():
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60)
    worker = Path("/proc", done.stdout.strip())
    deadline = time.monotonic() + 30
    while worker.exists() and "State:\tZ" not in (worker / "status").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not worker.exists() or "State:\tZ" in (worker / "status").read_text()


def test_streamed_rows_are_tokenised_ahead_by_processes_as_in_their_turn(rows_of, others):
    rows, tokenizer = rows_of(ROWS), make_tokenizer()

    def tokenise(part):
        return SFTDataset(part, tokenizer, FORM, max_len=24)

    one, several = (StreamedRows(rows, tokenise, workers=count) for count in (0, 2))
    assert (one.ahead, several.ahead) == (0, 2)
    sampler = StatefulSampler(len(rows), seed=3)
    sizes = split_updates(len(rows), 30)
    for place, size in enumerate(sizes, start=1):
        items = sampler.next_batch(size)
        several.announce([items, *sampler.peek(sizes[place : place + 2])])
        assert [r.tokens for r in several.window(items)] == [r.tokens for r in one.window(items)]
    assert one.closing() == several.closing() and several._under_way == {}
    several.close()
    assert set(multiprocessing.active_children()) <= others


def test_a_bad_row_that_was_tokenised_ahead_is_named_when_its_turn_comes(rows_of):
    rows = [dict(row) for row in ROWS * 2]
    del rows[FIRST_ROWS + 3]["output"]
    tokenizer = make_tokenizer()
    data = StreamedRows(rows_of(rows), lambda part: SFTDataset(part, tokenizer, FORM, max_len=24), workers=1)
    data.announce([[1], [FIRST_ROWS + 3]])
    assert len(data.window([1])) == 1
    with pytest.raises(DataError, match=f"row {FIRST_ROWS + 4}: there is no column 'output'"):
        data.window([FIRST_ROWS + 3])
    data.close()
