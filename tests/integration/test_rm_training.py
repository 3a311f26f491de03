"""Reward models against a plain PyTorch loop, against themselves after a stop, and in plain transformers."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.integration import rm_worker as worker
from tests.integration.backend_worker import run_ranks
from tests.integration.sft_worker import largest_difference, metrics_of
from tests.tiny_models import END_ID, PAD_ID, make_tiny_model


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rm")
    return {
        "model": make_tiny_model(folder / "model", "qwen3", tie=False),
        "data": worker.write_pairs(folder / "train.jsonl"),
        "held_out": worker.write_pairs(folder / "held_out.jsonl", pairs=5, seed=2),
    }


def _train_every_way(folder: Path, inputs: dict[str, Path], expected: dict[str, Any]) -> None:
    cases: list[dict[str, Any]] = [
        {"ds": {"zero_stage": 2}, "data": {"streaming": True}},
        {"ds": {"zero_stage": 3}},
    ]
    # Each start costs seconds, so what has nothing to do with the number of ranks is tried with one of them.
    if int(os.environ["WORLD_SIZE"]) == 1:
        cases.append({"ds": {"zero_stage": 0}, "train": {"micro_batch_size": 1}})
    else:
        cases.append({"ds": {"packing_samples": False}, "model": {"loss_type": "logexp"}})
        cases.append({"train": {"micro_batch_size": 64}, "model": {"gradient_checkpointing_enable": True}})
    for number, changes in enumerate(cases):
        config = worker.make_config(folder / str(number), inputs["model"], inputs["data"], **changes)
        backend = worker.train_in_place(config)
        assert backend.unmoved_parameters() == [], changes
        if backend.rank:
            continue
        lines = metrics_of(config)
        assert [line["step"] for line in lines] == list(range(1, worker.STEPS + 1))
        for line, wanted in zip(lines, expected["lines"], strict=True):
            for name, value in wanted.items():
                assert line[name] == pytest.approx(value, rel=1e-5, abs=2e-6), (changes, name)
        weights = worker.exported(config.ckpt.output_dir)
        assert largest_difference(weights, expected["weights"]) <= 1e-6, changes


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_way_to_deal_out_pairs_takes_the_steps_of_a_plain_pytorch_loop(
    inputs: dict[str, Path], ranks: int, tmp_path: Path
) -> None:
    expected = worker.plain_training(inputs["model"], inputs["data"])
    assert any(line["actor/grad_norm"] > 0.5 for line in expected["lines"]), "the clip has to be active"
    run_ranks(_train_every_way, ranks, tmp_path, inputs, expected)


def _stop_and_resume(folder: Path, inputs: dict[str, Path]) -> None:
    config = worker.make_config(
        folder,
        inputs["model"],
        inputs["data"],
        eval={"dataset": str(inputs["held_out"]), "steps": 3},
        ckpt={"save_steps": 2, "max_num": 9, "save_hf": True, "load_enable": True},
    )
    worker.train_in_place(config)
    whole, lines = worker.exported(config.ckpt.output_dir), metrics_of(config)
    states = Path(config.ckpt.path)
    last = AutoModelForSequenceClassification.from_pretrained(states / "global_step6_hf")
    out = AutoModelForSequenceClassification.from_pretrained(config.ckpt.output_dir)
    assert (last.config.mean, last.config.std) == (out.config.mean, out.config.std)
    for step in (4, 6):
        shutil.rmtree(states / f"global_step{step}")
    worker.train_in_place(config)
    assert metrics_of(config) == lines
    resumed = worker.exported(config.ckpt.output_dir)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    again = AutoModelForSequenceClassification.from_pretrained(config.ckpt.output_dir).config
    assert (again.mean, again.std) == (out.config.mean, out.config.std)
    assert {"loss/eval", "accuracy/eval", "reward_chosen/eval", "reward_rejected/eval"} <= lines[-1].keys()


def test_a_resumed_run_goes_on_bit_for_bit_as_if_it_had_not_been_stopped(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    run_ranks(_stop_and_resume, 1, tmp_path, inputs)


def _check_export(folder: Path, inputs: dict[str, Path]) -> None:
    from openrlhf.data.packed_batch import pack_rows

    changes = {"ds": {"value_head_prefix": "value_head"}, "eval": {"dataset": str(inputs["held_out"]), "steps": 9}}
    config = worker.make_config(folder, inputs["model"], inputs["data"], **changes)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        backend = worker.train_in_place(config)
    assert "rewards of 5 held-out pairs: mean" in printed.getvalue()
    rows = [row for chosen, rejected, _ in worker.plain_pairs(inputs["model"], inputs["held_out"])
            for row in (chosen, rejected)]  # fmt: skip
    assert all(row[-1] == END_ID for row in rows)
    held_out = len(rows)
    rows += [row[:-1] for row in rows]
    masks = [torch.zeros(len(row), dtype=torch.bool) for row in rows]
    with torch.no_grad():
        ours = backend.row_scores(pack_rows(rows, masks))
    model = AutoModelForSequenceClassification.from_pretrained(config.ckpt.output_dir, dtype=torch.float32)
    assert model.config.num_labels == 1 and model.config.pad_token_id != model.config.eos_token_id
    tokenizer = AutoTokenizer.from_pretrained(config.ckpt.output_dir)
    assert tokenizer.pad_token_id == model.config.pad_token_id
    for side in ("right", "left"):
        padded = tokenizer.pad({"input_ids": rows}, padding=True, padding_side=side, return_tensors="pt")
        with torch.no_grad():
            theirs = model(**padded).logits[:, 0]
        assert torch.allclose(ours, theirs, atol=1e-5), side
    for row, score in zip(rows, ours, strict=True):
        with torch.no_grad():
            assert torch.allclose(model(torch.tensor([row])).logits[0, 0], score, atol=1e-5)
    assert model.config.mean == pytest.approx(float(ours[:held_out].mean()), abs=1e-5)
    assert model.config.std == pytest.approx(float(ours[:held_out].std()), abs=1e-5)


def test_the_export_scores_in_plain_transformers_as_the_model_did_in_training(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    run_ranks(_check_export, 1, tmp_path, inputs)


def _check_padding(folder: Path, inputs: dict[str, Path]) -> None:
    config = worker.make_config(folder, folder / "model", inputs["data"], train={"max_epochs": 1})
    worker.train_in_place(config)


def test_a_tokenizer_that_pads_with_eos_is_exported_with_a_pad_token_of_its_own(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(inputs["model"], tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path / "model")
    run_ranks(_check_padding, 1, tmp_path, inputs)
    saved = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert saved.pad_token_id == model.config.pad_token_id == PAD_ID != saved.eos_token_id == END_ID
