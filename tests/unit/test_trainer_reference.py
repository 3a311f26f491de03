"""What a reference said, stored beside the states of a run and read again by the one that goes on."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from openrlhf.config import ConfigError, DPOConfig, DPORefConfig
from openrlhf.data.preference import PreferenceDataset, PreferenceFormat
from openrlhf.data.sources import load_dataset_mix
from openrlhf.trainer.reference import FILE, Store, mark_of
from tests.tiny_models import make_tokenizer

TABLES = {"training": torch.tensor([[-1.25, -2.5]], dtype=torch.float64)}
MARKS = {"training": "a"}


def store(folder, *, reads=True, writes=True) -> Store:
    return Store(folder / "states" / FILE, reads, writes)


def test_what_was_stored_is_read_bit_for_bit_and_no_half_file_stays(tmp_path):
    store(tmp_path).write(TABLES, MARKS)
    found = store(tmp_path).read({**MARKS, "evaluation": "b"})
    assert found.keys() == {"training"} and torch.equal(found["training"], TABLES["training"])
    assert [path.name for path in (tmp_path / "states").iterdir()] == [FILE]


def test_what_follows_from_other_data_is_not_taken(tmp_path):
    store(tmp_path).write(TABLES, MARKS)
    assert store(tmp_path).read({"training": "b"}) == {}


def test_a_run_that_starts_anew_reads_nothing_and_one_without_states_writes_nothing(tmp_path):
    store(tmp_path, writes=False).write(TABLES, MARKS)
    assert not (tmp_path / "states").exists()
    store(tmp_path).write(TABLES, MARKS)
    assert store(tmp_path, reads=False).read(MARKS) == {}


def test_a_broken_file_is_refused_with_what_to_do(tmp_path):
    store(tmp_path).write(TABLES, MARKS)
    (tmp_path / "states" / FILE).write_bytes(b"torn")
    with pytest.raises(ConfigError, match=f"{FILE} cannot be read .*: remove it, and .* computed again") as caught:
        store(tmp_path).read(MARKS)
    assert "\n" not in str(caught.value)


def test_a_place_that_cannot_be_written_is_an_error_of_the_disk(tmp_path):
    barred = store(tmp_path)
    barred.file.with_suffix(".partial").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        barred.write(TABLES, MARKS)
    assert not barred.file.exists()


def pairs(folder, answer="2", prompt="1 + 1"):
    file = folder / "a.jsonl"
    file.write_text(json.dumps({"q": prompt, "chosen": answer, "rejected": "3"}) + "\n")
    rows = load_dataset_mix(str(file), None, split="train", max_samples=99, seed=0)
    return PreferenceDataset(rows, make_tokenizer(), PreferenceFormat(prompt_key="q"), max_len=64)


def test_the_mark_tells_apart_whatever_changes_a_log_prob(tmp_path):
    config = DPOConfig(ref=DPORefConfig(model_name_or_path="m"))
    other_model = dataclasses.replace(config, ref=DPORefConfig(model_name_or_path="n"))
    other_dtype = dataclasses.replace(config, ds=dataclasses.replace(config.ds, param_dtype="fp32"))
    data = pairs(tmp_path)
    marks = [mark_of(each, data) for each in (config, other_model, other_dtype)]
    marks += [mark_of(config, pairs(tmp_path, answer="4")), mark_of(config, pairs(tmp_path, prompt="1 + 2"))]
    assert len(set(marks)) == len(marks)
    assert mark_of(config, pairs(tmp_path)) == marks[0]
