"""DPO against a plain PyTorch loop, and against itself after a stop: real DeepSpeed over gloo, one and two ranks."""

from __future__ import annotations

import contextlib
import gc
import io
import math
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from openrlhf.trainer.reference import FILE
from tests.integration import dpo_worker as worker
from tests.integration.backend_worker import run_ranks
from tests.integration.sft_worker import exported, largest_difference, metrics_of
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dpo")
    return {
        "model": make_tiny_model(folder / "model", "qwen3", tie=False, hidden=128),
        "reference": make_tiny_model(folder / "reference", "qwen3", tie=False, hidden=128, seed=5),
        "data": worker.write_pairs(folder / "train.jsonl"),
        "held_out": worker.write_pairs(folder / "held_out.jsonl", rows=7, seed=2),
    }


def _train_every_way(folder: Path, inputs: dict[str, Path], expected: dict[str, Any]) -> None:
    cases: list[dict[str, Any]] = [
        {"ds": {"zero_stage": 0}},
        {"ds": {"zero_stage": 2}, "ref": {"precompute": True}},
        {"ds": {"zero_stage": 3}, "data": {"streaming": True}},
        {"ds": {"zero_stage": 3}, "ref": {"precompute": True}},
    ]
    # Each start costs seconds, so what has nothing to do with the number of ranks is tried with one of them.
    if int(os.environ["WORLD_SIZE"]) == 1:
        cases.append({"train": {"micro_batch_size": 1}, "ref": {"offload": True}})
    else:
        cases.append({"ds": {"zero_stage": 1, "packing_samples": False}})
        cases.append({"train": {"micro_batch_size": 64}, "model": {"gradient_checkpointing_enable": True}})
    for number, changes in enumerate(cases):
        changes = {"eval": {"dataset": str(inputs["held_out"]), "steps": 4}, **changes}
        changes["ref"] = {"model_name_or_path": str(inputs["reference"]), **changes.get("ref", {})}
        config = worker.make_config(folder / str(number), inputs["model"], inputs["data"], **changes)
        backend = worker.train_in_place(config)
        assert backend.unmoved_parameters() == [], changes
        if backend.rank:
            continue
        lines = metrics_of(config)
        assert [line["step"] for line in lines] == list(range(1, worker.STEPS + 1))
        for line, wanted in zip(lines, expected["lines"], strict=True):
            for name, value in wanted.items():
                # Rewards and likelihoods add up the rounding of some fifty tokens each.
                tolerance = 1e-6 if name in ("loss/train", "actor/grad_norm", "actor/lr") else 1e-5
                assert line[name] == pytest.approx(value, rel=tolerance, abs=tolerance), (changes, line["step"], name)
            assert ("loss/eval" in line) == (line["step"] in (4, worker.STEPS))
        for name, value in expected["eval"].items():
            assert lines[-1][name] == pytest.approx(value, rel=1e-5, abs=1e-5), (changes, name)
        weights = exported(config.ckpt.output_dir)
        assert largest_difference(weights, expected["weights"]) <= 1e-6, changes


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_way_to_deal_out_pairs_and_ask_the_reference_takes_the_steps_of_a_plain_pytorch_loop(
    inputs: dict[str, Path], ranks: int, tmp_path: Path
) -> None:
    expected = worker.plain_training(inputs["model"], inputs["reference"], inputs["data"])
    assert all(line["actor/grad_norm"] > 0.5 for line in expected["lines"]), "the clip has to be active"
    model = worker.load(inputs["model"])
    model.load_state_dict(expected["weights"])
    with torch.no_grad():
        held_out = worker.plain_pairs(inputs["model"], inputs["held_out"])
        means = worker.mean_metrics(model, worker.load(inputs["reference"]), held_out, "eval")
    expected["eval"] = {name: float(value) for name, value in means.items()}
    run_ranks(_train_every_way, ranks, tmp_path, inputs, expected)


def _start_at_the_reference(folder: Path, inputs: dict[str, Path]) -> None:
    for loss, begins in (("dpo", math.log(2)), ("ipo", (0.5 / worker.BETA) ** 2), ("kto", 0.5)):
        model = {"loss_type": loss, "nll_loss_coef": 0.0}
        config = worker.make_config(folder / loss, inputs["model"], inputs["data"], model=model)
        worker.train_in_place(config)
        first, *_, last = metrics_of(config)
        assert first["loss/train"] == pytest.approx(begins)
        assert first["reward_gap/train"] == pytest.approx(0.0, abs=1e-6)
        assert last["reward_gap/train"] > 0.01
    for loss in ("orpo", "simpo"):
        config = worker.make_config(folder / loss, inputs["model"], inputs["data"], model={"loss_type": loss})
        worker.train_in_place(config)
        first, *_, last = metrics_of(config)
        assert last["loss/train"] < first["loss/train"]


def test_a_policy_that_starts_at_its_reference_has_a_loss_of_log_2_and_every_loss_trains(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    run_ranks(_start_at_the_reference, 1, tmp_path, inputs)


def _stop_and_resume(folder: Path, inputs: dict[str, Path]) -> None:
    from openrlhf.backends.distributed import raise_if_any

    shutil.copytree(inputs["reference"], folder / "reference", dirs_exist_ok=True)
    raise_if_any("copying", None)
    for stage, dtype, precompute in ((2, "fp32", True), (3, "bf16", False)):
        config = worker.make_config(
            folder / f"{stage}",
            inputs["model"],
            inputs["data"],
            ds={"zero_stage": stage, "param_dtype": dtype},
            ref={"precompute": precompute, "model_name_or_path": str(folder / "reference")},
            ckpt={"save_steps": 2, "max_num": 9, "load_enable": True},
        )
        backend = worker.train_in_place(config)
        whole, lines = exported(config.ckpt.output_dir), metrics_of(config)
        states = Path(config.ckpt.path)
        raise_if_any("reading", None)  # all ranks have read before one removes
        if backend.rank == 0:
            assert (states / FILE).is_file() == precompute
            # As if the run had been stopped in the middle of the first epoch.
            for step in (4, 6):
                shutil.rmtree(states / f"global_step{step}")
            if precompute:
                # What it said is stored, so the reference itself is not needed any more.
                (folder / "reference").rename(folder / "gone")
        raise_if_any("removing", None)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            worker.train_in_place(config)
        if backend.rank == 0 and precompute:
            assert f"reference log-probs of the training data: read from {states / FILE}" in printed.getvalue()
            (folder / "gone").rename(folder / "reference")
        raise_if_any("moving back", None)
        assert metrics_of(config) == lines
        resumed = exported(config.ckpt.output_dir)
        assert all(torch.equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_goes_on_bit_for_bit_and_does_not_need_its_reference_again(
    inputs: dict[str, Path], ranks: int, tmp_path: Path
) -> None:
    run_ranks(_stop_and_resume, ranks, tmp_path, inputs)


def _give_the_reference_up(folder: Path, inputs: dict[str, Path]) -> None:
    from openrlhf.models.loading import load_tokenizer
    from openrlhf.trainer import dpo
    from openrlhf.trainer.reference import ReferenceModel, precomputed
    from openrlhf.trainer.supervised_run import load_data

    for stage in (0, 2, 3):
        ref = {"precompute": True, "model_name_or_path": str(inputs["reference"])}
        config = worker.make_config(
            folder / f"{stage}", inputs["model"], inputs["data"], ref=ref, ds={"zero_stage": stage}
        )
        tokenizer = load_tokenizer(config.model.model_name_or_path)
        data, _ = load_data(config, dpo.tokenise, tokenizer)
        before = _live_elements()
        load = partial(ReferenceModel.load, config, device="cpu")
        tables = precomputed(config, {"training": data}, load, pad_token_id=tokenizer.pad_token_id)
        assert tables["training"].shape == (len(data), 2)
        # A model of this kind has some 300,000.
        assert _live_elements() - before < 1000, stage


def _live_elements() -> int:
    """Elements of all tensors of this process."""
    gc.collect()
    return sum(found.numel() for found in gc.get_objects() if isinstance(found, torch.Tensor))


def test_a_reference_that_was_asked_before_training_leaves_nothing_in_memory(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    run_ranks(_give_the_reference_up, 1, tmp_path, inputs)
