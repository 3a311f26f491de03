"""Exports of adapters beside those of whole models: which files stay, and what counts as an export."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf.backends.checkpoints import CheckpointStore
from openrlhf.backends.weights import replace_files

MODEL = ["config.json", "generation_config.json", "model.safetensors"]
ADAPTER = ["adapter_config.json", "adapter_model.safetensors"]


def folder_of(folder: Path, names: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(name)
    return folder


def kept(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(("before", "after"), [(MODEL, ADAPTER), (ADAPTER, MODEL), (ADAPTER, ADAPTER)])
def test_of_an_earlier_export_nothing_stays_that_would_be_loaded_with_the_new_one(tmp_path, before, after):
    target = folder_of(tmp_path / "out", [*before, "metrics.jsonl", "tokenizer.json"])
    replace_files(folder_of(tmp_path / "new", after), target)
    assert kept(target) - {"generation_config.json"} == {*after, "metrics.jsonl", "tokenizer.json"} - {
        "generation_config.json"
    }


def test_an_exported_adapter_counts_as_a_checkpoint_and_goes_when_newer_ones_come(tmp_path):
    store = CheckpointStore(tmp_path, max_num=2, max_mem_gb=1.0)
    for step in (1, 2, 3):
        folder_of(store.export_folder(step), ADAPTER)
    assert len(store.held()) == 3
    store.prune()
    assert kept(tmp_path) == {"global_step2_hf", "global_step3_hf"}


def test_an_adapter_that_a_kill_left_half_written_is_swept_away(tmp_path):
    store = CheckpointStore(tmp_path, max_num=2, max_mem_gb=1.0)
    folder_of(store.export_folder(1) / ".partial", ADAPTER[1:])
    whole = folder_of(store.export_folder(2), ADAPTER)
    folder_of(whole / ".partial", ADAPTER[1:])
    store.sweep()
    assert kept(tmp_path) == {"global_step2_hf"} and kept(whole) == set(ADAPTER)
