"""The comparison with TRL: what both sides are given, and what counts as the same."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.supervised_cases import (
    CASES,
    LINE_BREAK_TEMPLATE,
    SEED,
    Case,
    Difference,
    Settings,
    command_here,
    job_of_trl,
    make_model,
    make_rows,
    write_data,
)
from benchmarks.supervised_losses import as_known, compare, losses_table, weights_apart
from benchmarks.supervised_speed import pack_length, speed_table, steps_here, summary
from openrlhf.config import check, parse
from openrlhf.config.errors import ConfigError
from openrlhf.data.sampler import StatefulSampler
from openrlhf.data.sft import SFTDataset, SFTFormat
from openrlhf.data.sources import load_dataset_mix
from openrlhf.models.loading import load_tokenizer

SETTINGS = Settings(steps=2, batch=4, micro_batch=2)


def _steps(*losses: float) -> list[dict[str, float]]:
    return [{"loss": loss, "grad_norm": 1.0, "lr": 1e-3} for loss in losses]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("toy"), "toy")


def test_losses_further_apart_than_the_tolerance_are_named_by_their_first_step() -> None:
    found = compare(_steps(1.0, 2.0, 3.0), _steps(1.00009, 2.00011, 3.1))
    assert not found["agree"] and found["first"] == 2
    assert found["loss"] == pytest.approx(0.1)
    assert compare(_steps(1.0, 2.0), _steps(1.00009, 2.00009))["agree"]


@pytest.mark.parametrize("broken", [(1.0, math.nan), (1.0,), (1.0, 2.0, 3.0)])
def test_a_loss_that_is_no_number_and_a_missing_step_are_no_agreement(broken: tuple[float, ...]) -> None:
    for pair in ((_steps(1.0, 2.0), _steps(*broken)), (_steps(*broken), _steps(1.0, 2.0))):
        assert not compare(*pair)["agree"]
    assert not compare([], [])["agree"]


def test_losses_that_differ_as_they_are_known_to_are_as_known_and_others_are_not() -> None:
    known = Difference("another loss", first=3, most=0.1)
    there = _steps(1.0, 2.0, 3.0, 4.0)
    assert as_known(_steps(1.0, 2.0, 3.05, 4.09), there, known) and as_known(there, there, None)
    # Before its first step a difference is not there yet.
    assert as_known(there[:2], there[:2], known)
    too_early, too_far, nowhere = (1.0, 2.01, 3.05, 4.0), (1.0, 2.0, 3.0, 4.11), (1.0, 2.0, 3.0, 4.0)
    for losses in (too_early, too_far, nowhere):
        assert not as_known(_steps(*losses), there, known)
    assert not as_known(_steps(1.0, 2.0, 3.05, 4.0), there, None)
    # Beyond the steps that the bound was measured over, it grows without being wrong.
    assert as_known(_steps(*[1.0] * 2, *[1.1] * 18, 1.5), _steps(*[1.0] * 2, *[1.05] * 18, 1.0), known)


@pytest.mark.parametrize("known", [None, Difference("another loss", first=1, most=0.1)])
@pytest.mark.parametrize("part", ["loss", "grad_norm", "lr"])
def test_a_known_difference_excuses_no_lost_step_no_nan_and_no_other_learning_rate(part: str, known) -> None:
    there = _steps(1.0, 2.0, 3.0)
    here = there if known is None else _steps(1.05, 2.0, 3.0)
    assert as_known(here, there, known)
    assert not as_known(here[:2], there, known) and not as_known(here, there[:2], known)
    assert not as_known([], [], known)
    for broken in (math.nan, math.inf):
        assert not as_known([*here[:2], here[2] | {part: broken}], there, known)
        assert not as_known(here, [*there[:2], there[2] | {part: broken}], known)
    if part == "lr":
        assert not as_known([*here[:2], here[2] | {part: 1.1e-3}], there, known)


def test_the_table_says_where_losses_part() -> None:
    same = compare(_steps(1.0), _steps(1.0)) | {"weights": 0.0, "differs": None}
    other = compare(_steps(1.0), _steps(2.0)) | {"weights": 0.5, "differs": "another loss"}
    lines = losses_table({"same": same, "other": other}).splitlines()[2:]
    assert "yes, all 1 steps" in lines[0]
    assert "no, from step 1 on" in lines[1] and "another loss" in lines[1] and "5.0e-01" in lines[1]


def test_final_weights_are_compared_by_name(tmp_path: Path) -> None:
    for name, weights in {
        "a": {"w": torch.zeros(2)},
        "b": {"w": torch.tensor([0.0, 0.25])},
        "c": {"v": torch.zeros(2)},
        "d": {"w": torch.tensor([math.nan, 0.0])},
    }.items():
        (tmp_path / name).mkdir()
        save_file(weights, tmp_path / name / "model.safetensors")
    assert weights_apart(tmp_path / "a", tmp_path / "b") == 0.25
    assert math.isnan(weights_apart(tmp_path / "a", tmp_path / "d"))
    with pytest.raises(ValueError, match=r"only one of .* has \['v', 'w'\]"):
        weights_apart(tmp_path / "a", tmp_path / "c")


def test_trl_gets_the_rows_in_the_order_in_which_they_are_trained_on_here(tmp_path: Path) -> None:
    rows = make_rows("dpo", "text", 8, (20, 60))
    ours, theirs = write_data(tmp_path, rows, SETTINGS)
    sampler = StatefulSampler(len(rows), seed=SEED)
    batches = sampler.next_batch(SETTINGS.batch) + sampler.next_batch(SETTINGS.batch)
    assert [json.loads(line) for line in theirs.read_text().splitlines()] == [rows[place] for place in batches]
    assert [json.loads(line) for line in ours.read_text().splitlines()] == rows and batches != sorted(batches)
    with pytest.raises(ValueError, match="2 steps of 4 need as many rows, not 7"):
        write_data(tmp_path, rows[:7], SETTINGS)


@pytest.mark.parametrize("name", CASES)
def test_each_case_is_a_command_that_is_accepted_and_a_job_with_the_same_numbers(
    name: str, model: Path, tmp_path: Path
) -> None:
    case = CASES[name]
    ours, theirs = write_data(tmp_path, make_rows(case.task, case.form, 8, (20, 60)), SETTINGS)
    words = command_here(case, SETTINGS, model, ours, tmp_path / "here")
    config = parse(f"train_{case.task}", words[3:])
    check(config)
    job = job_of_trl(case, SETTINGS, model, theirs, tmp_path / "trl")
    trl, optimizer = job["config"], config.optimizer
    assert trl["per_device_train_batch_size"] * trl["gradient_accumulation_steps"] == config.train.batch_size == 4
    assert (trl["adam_beta1"], trl["adam_beta2"]) == tuple(optimizer.adam.betas)
    assert (trl["learning_rate"], trl["adam_epsilon"]) == (optimizer.adam.lr, optimizer.adam.eps)
    assert (trl["weight_decay"], trl["max_grad_norm"]) == (optimizer.adam.weight_decay, optimizer.max_norm)
    assert trl["lr_scheduler_kwargs"] == {"min_lr_rate": optimizer.min_lr_ratio} and trl["warmup_steps"] == 1
    assert job["dtype"] == "float32" and config.ds.param_dtype == "fp32"


def test_rows_of_every_form_become_tokens_without_loss_and_differ_in_length(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "toy", LINE_BREAK_TEMPLATE)
    tokenizer = load_tokenizer(folder)
    forms = {
        "text": SFTFormat("prompt", "completion", "{}"),
        "whole": SFTFormat("text", pretrain_mode=True),
        "chat": SFTFormat("prompt", "completion", apply_chat_template=True),
    }
    for name, form in forms.items():
        made = make_rows("sft", name, 8, (20, 60))
        file, _ = write_data(tmp_path, made, SETTINGS)
        rows = load_dataset_mix(str(file), None, split="train", max_samples=8, seed=0)
        data = SFTDataset(rows, tokenizer, form, max_len=SETTINGS.max_len)
        assert len(data) == 8 and len(set(data.lengths.tolist())) > 2
        assert tokenizer.unk_token_id not in data[0].tokens and data[0].tokens[-1] == tokenizer.eos_token_id
        if name != "chat":
            assert tokenizer.decode(data[0].tokens[:-1]) == "".join(made[0].values())


def test_speed_is_read_off_the_lines_of_both_sides(model: Path) -> None:
    lines = [
        {"time": 10.0, "time/step": 2.0, "throughput/tokens_per_s": 50.0},
        {"time": 11.0, "time/step": 0.8, "throughput/tokens_per_s": 100.0},
    ]
    steps = steps_here(lines)
    # What stands between two steps counts, as it does on the other side.
    assert [step["seconds"] for step in steps] == [2.0, 1.0] and [step["tokens"] for step in steps] == [100.0, 80.0]
    sides = {"openrlhf": summary(steps), "trl, padded": summary([{"seconds": 2.0, "tokens": 65.0}])}
    assert sides["openrlhf"]["tokens_per_s"] == 65.0 and sides["openrlhf"]["slowest"] == 50.0
    assert "| 32 | 32 to 32 | 2.00 |" in speed_table({"case": {"sides": sides}})

    rows = [{"prompt": "ab", "completion": "c"}, {"prompt": "abcdefg", "completion": "hi"}]
    assert pack_length(rows, model, packs=1) == math.ceil(1.02 * (4 + 10)) and pack_length(rows, model, packs=9) == 10


def test_autocast_keeps_the_weights_of_trl_in_fp32(model: Path, tmp_path: Path) -> None:
    half = Settings(steps=1, batch=4, micro_batch=2, dtype="bf16")
    dtypes = {
        autocast: job_of_trl(Case("sft", trl={"bf16": autocast}), half, model, tmp_path, tmp_path / "trl")["dtype"]
        for autocast in (False, True)
    }
    assert dtypes == {False: "bfloat16", True: "float32"}


def test_a_case_that_the_command_would_refuse_is_noticed(model: Path, tmp_path: Path) -> None:
    wrong = Case("dpo", flags=("--model.loss_type", "ipo", "--model.label_smoothing", "0.2"))
    with pytest.raises(ConfigError, match="label_smoothing"):
        check(parse("train_dpo", command_here(wrong, SETTINGS, model, tmp_path / "rows.jsonl", tmp_path / "here")[3:]))
