"""The pieces of SFT that need no process group."""

from __future__ import annotations

import json

import pytest
import torch

from openrlhf.data.sft import SFTDataset, SFTFormat
from openrlhf.data.sources import load_dataset_mix
from openrlhf.trainer.sft import SFTObjective
from openrlhf.trainer.supervised import LoopSettings, planned_steps
from tests.tiny_models import PAD_ID, make_tokenizer


@pytest.fixture
def data(tmp_path) -> SFTDataset:
    with (tmp_path / "a.jsonl").open("w") as file:
        for n in range(6):
            file.write(json.dumps({"q": f"{n} +", "a": "3 " * (n + 1)}) + "\n")
    rows = load_dataset_mix(str(tmp_path / "a.jsonl"), None, split="train", max_samples=99, seed=0)
    return SFTDataset(rows, make_tokenizer(), SFTFormat(input_key="q", output_key="a"), max_len=64)


def test_units_are_the_trained_tokens_of_the_asked_rows_and_those_of_a_pack(data):
    objective = SFTObjective(data, PAD_ID)
    items = [4, 0, 3]
    batch = objective.pack(items)
    assert objective.units(items) == int(batch.action_mask.sum()) > 0
    assert batch.lengths.tolist() == [len(data[item].tokens) for item in items]
    assert [int(objective.lengths[item]) for item in items] == batch.lengths.tolist()
    assert batch.tokens.tolist() == [token for item in items for token in data[item].tokens]
    assert objective.units(range(6)) == sum(int(record.loss_mask.sum()) for record in data)


def test_no_rows_make_an_empty_batch_without_a_trained_token(data):
    batch = SFTObjective(data, PAD_ID).pack([])
    assert batch.pad_rows == batch.num_rows == 1
    assert not batch.action_mask.any()
    assert torch.equal(batch.tokens, torch.full((2,), PAD_ID))


@pytest.mark.parametrize(("items", "batch", "epochs", "steps"), [(500, 64, 1, 8), (129, 128, 2, 4), (128, 128, 3, 3)])
def test_the_schedule_counts_the_partial_step_of_every_epoch(items, batch, epochs, steps):
    assert planned_steps(items, LoopSettings(batch_size=batch, micro_batch_size=1, max_epochs=epochs)) == steps
