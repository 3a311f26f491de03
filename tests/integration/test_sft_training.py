"""SFT against a plain PyTorch loop, and against itself after a stop: real DeepSpeed over gloo, one and two ranks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from openrlhf.config import AdamConfig, ConfigError, LoraConfig
from tests.integration import sft_worker as worker
from tests.integration.backend_worker import run_ranks
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sft")
    return {
        "model": make_tiny_model(folder / "model", "qwen3", tie=False, hidden=128),
        "data": worker.write_data(folder / "train.jsonl"),
        "held_out": worker.write_data(folder / "held_out.jsonl", rows=7, seed=2),
    }


def _train_every_way(folder: Path, inputs: dict[str, Path], expected: dict[str, Any]) -> None:
    cases: list[dict[str, Any]] = [
        {"ds": {"zero_stage": 0}},
        {"ds": {"zero_stage": 1}, "data": {"streaming": True}},
        {"ds": {"zero_stage": 2}},
        {"ds": {"zero_stage": 3}},
    ]
    # Each start costs seconds, so what has nothing to do with the number of ranks is tried with one of them.
    if int(os.environ["WORLD_SIZE"]) == 1:
        cases.append({"train": {"micro_batch_size": 1}})
    else:
        cases.append({"ds": {"packing_samples": False}})
        cases.append({"train": {"micro_batch_size": 64}, "model": {"gradient_checkpointing_enable": True}})
    for number, changes in enumerate(cases):
        changes = {"eval": {"dataset": str(inputs["held_out"]), "steps": 4}, **changes}
        config = worker.make_config(folder / str(number), inputs["model"], inputs["data"], **changes)
        backend = worker.train_in_place(config)
        assert backend.unmoved_parameters() == [], changes
        if backend.rank:
            continue
        lines = worker.metrics_of(config)
        assert [line["step"] for line in lines] == list(range(1, worker.STEPS + 1))
        for line, wanted in zip(lines, expected["lines"], strict=True):
            for name, value in wanted.items():
                assert line[name] == pytest.approx(value, rel=1e-6, abs=1e-6), (changes, name)
            assert ("loss/eval" in line) == (line["step"] in (4, worker.STEPS))
        assert lines[-1]["loss/eval"] == pytest.approx(expected["loss/eval"], rel=1e-5), changes
        weights = worker.exported(config.ckpt.output_dir)
        assert worker.largest_difference(weights, expected["weights"]) <= 1e-6, changes


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_way_to_deal_out_rows_takes_the_steps_of_a_plain_pytorch_loop(
    inputs: dict[str, Path], ranks: int, tmp_path: Path
) -> None:
    expected = worker.plain_training(inputs["model"], inputs["data"])
    assert all(line["actor/grad_norm"] > 0.5 for line in expected["lines"]), "the clip has to be active"
    model = AutoModelForCausalLM.from_pretrained(inputs["model"], dtype=torch.float32)
    model.load_state_dict(expected["weights"])
    expected["loss/eval"] = worker.mean_loss(model, worker.plain_rows(inputs["model"], inputs["held_out"]))
    run_ranks(_train_every_way, ranks, tmp_path, inputs, expected)


def _refuse_misfits(folder: Path, inputs: dict[str, Path]) -> None:
    """Weights of another shape than config.json says, and a state of another model, on the stages that differ."""
    wide, deep, torn = (folder / name for name in ("wide", "deep", "torn"))
    for stage in (0, 1, 3):
        options = {"ds": {"zero_stage": stage}, "ckpt": {"save_steps": 6, "load_enable": True}}
        with pytest.raises(ConfigError, match=f"{torn} do not fit.* is .512, 192. in the files and .512, 128. "):
            worker.train_in_place(worker.make_config(folder / "torn_out", torn, inputs["data"], **options))
        name = f"{os.environ['WORLD_SIZE']}-{stage}"
        worker.train_in_place(worker.make_config(folder / name, inputs["model"], inputs["data"], **options))
        for other, said in (
            (wide, r"embed_tokens.weight is \[512, 128\] there and \[512, 192\] in this run"),
            (deep, r"layers.2.* is missing there"),
        ):
            with pytest.raises(ConfigError, match=f"global_step6 was written by another model: .*{said}"):
                worker.train_in_place(worker.make_config(folder / name, other, inputs["data"], **options))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_does_not_fit_its_config_or_its_checkpoint_is_refused_by_the_first_weight_that_differs(
    inputs: dict[str, Path], ranks: int, tmp_path: Path
) -> None:
    wide = make_tiny_model(tmp_path / "wide", "qwen3", tie=False, hidden=192)
    make_tiny_model(tmp_path / "deep", "qwen3", tie=False, hidden=128, layers=3)
    shutil.copytree(inputs["model"], tmp_path / "torn")
    shutil.copy(wide / "model.safetensors", tmp_path / "torn" / "model.safetensors")
    run_ranks(_refuse_misfits, ranks, tmp_path, inputs)


def _refuse_encoders(folder: Path, inputs: dict[str, Path]) -> None:
    for stage in (0, 3):
        config = worker.make_config(folder, folder / "encoder", inputs["data"], ds={"zero_stage": stage})
        with pytest.raises(ConfigError, match="is no causal language model"):
            worker.train_in_place(config)


def test_an_encoder_is_refused_on_every_rank_sharded_or_not(inputs: dict[str, Path], tmp_path: Path) -> None:
    values = {"vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = AutoConfig.for_model("bert", **values, intermediate_size=128, max_position_embeddings=256)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "encoder")
    AutoTokenizer.from_pretrained(inputs["model"]).save_pretrained(tmp_path / "encoder")
    run_ranks(_refuse_encoders, 2, tmp_path, inputs)


def _stop_and_resume(folder: Path, inputs: dict[str, Path]) -> None:
    from openrlhf.backends.distributed import raise_if_any

    for stage, dtype in ((2, "fp32"), (3, "bf16")):
        config = worker.make_config(
            folder / f"{stage}",
            inputs["model"],
            inputs["data"],
            ds={"zero_stage": stage, "param_dtype": dtype},
            data={"streaming": dtype == "bf16"},
            ckpt={"save_steps": 2, "max_num": 9, "save_hf": True, "load_enable": True},
        )
        backend = worker.train_in_place(config)
        whole, lines = worker.exported(config.ckpt.output_dir), worker.metrics_of(config)
        states = Path(config.ckpt.path)
        raise_if_any("reading", None)  # all ranks have read before one removes
        if backend.rank == 0:
            assert sorted(path.name for path in states.iterdir()) == [
                *(f"global_step{step}{kind}" for step in (2, 4, 6) for kind in ("", "_hf")),
                "latest",
            ]
            _check_checkpoint(states, config.ckpt.output_dir)
            # As if the run had been stopped in the middle of the first epoch, before its end.
            for step in (4, 6):
                shutil.rmtree(states / f"global_step{step}")
        raise_if_any("removing", None)
        worker.train_in_place(config)
        assert worker.metrics_of(config) == lines
        resumed = worker.exported(config.ckpt.output_dir)
        assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def _check_checkpoint(states: Path, output_dir: str) -> None:
    for step in (2, 4, 6):
        assert (states / f"global_step{step}" / "config.yaml").read_text().startswith("trust_remote_code")
        AutoTokenizer.from_pretrained(states / f"global_step{step}_hf")
    last = worker.exported(states / "global_step6_hf")
    assert worker.largest_difference(worker.exported(output_dir), last) == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_goes_on_bit_for_bit_as_if_it_had_not_been_stopped(
    inputs: dict[str, Path], ranks: int, tmp_path: Path
) -> None:
    run_ranks(_stop_and_resume, ranks, tmp_path, inputs)


def _refuse_wrong_resumes(folder: Path, inputs: dict[str, Path]) -> None:
    first = worker.make_config(folder, inputs["model"], inputs["data"], ckpt={"save_steps": 2})
    worker.train_in_place(first)
    for group, change, message in (
        ("train", {"batch_size": 22}, "written with --train.batch_size 8, and this run has 22"),
        ("train", {"max_epochs": 3}, "written with --train.max_epochs 2, and this run has 3"),
        ("optimizer", {"lr_scheduler": "linear"}, "written with --lr_scheduler cosine_with_min_lr, and this .* linear"),
        ("optimizer", {"adam": AdamConfig(lr=1.0)}, "written with --adam.lr 0.002, and this run has 1.0"),
        ("optimizer", {"optim": "muon"}, "written with --optim adam, and this run has muon"),
        ("ds", {"lora": LoraConfig(rank=4)}, "written with --ds.lora.rank 0, and this run has 4"),
        ("train", {"seed": 5}, "seed 11, this run has 5"),
        ("data", {"max_samples": 20}, "num_items 22, this run has 20"),
    ):
        changes = {group: change, "ckpt": {"load_enable": True, **(change if group == "ckpt" else {})}}
        config = worker.make_config(folder, inputs["model"], inputs["data"], **changes)
        with pytest.raises(ConfigError, match=message):
            worker.train_in_place(config)
    nothing = worker.make_config(folder / "new", inputs["model"], inputs["data"], ckpt={"load_enable": True})
    worker.train_in_place(nothing)
    assert len(worker.metrics_of(nothing)) == worker.STEPS
    only_hf = {"save_steps": 2, "save_hf": True, "disable_ds": True, "max_num": 2}
    config = worker.make_config(folder / "hf", inputs["model"], inputs["data"], ckpt=only_hf)
    worker.train_in_place(config)
    assert sorted(path.name for path in Path(config.ckpt.path).iterdir()) == ["global_step4_hf", "global_step6_hf"]
    assert (Path(config.ckpt.path) / "global_step6_hf" / "config.yaml").is_file()


def test_states_of_other_data_are_refused_and_missing_or_unwanted_ones_are_no_obstacle(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    run_ranks(_refuse_wrong_resumes, 1, tmp_path, inputs)


def _fill_the_disk(folder: Path, inputs: dict[str, Path]) -> list[str]:
    """Trains with a file of metrics that no byte goes into, and where nothing else can be written either."""
    from openrlhf.backends.distributed import RankError, raise_if_any

    said = []
    for number, changes in enumerate(
        (
            {},
            # Metrics that wait for a step to be logged, while something else fails.
            {"logger": {"logging_steps": 100}, "ckpt": {"save_steps": 2, "path": str(folder / "file" / "states")}},
            {"logger": {"logging_steps": 100}},
        )
    ):
        config = worker.make_config(folder / str(number), inputs["model"], inputs["data"], **changes)
        if os.environ["RANK"] == "0":
            out = Path(config.ckpt.output_dir)
            out.mkdir(parents=True)
            (out / "metrics.jsonl").symlink_to("/dev/full")
            (folder / "file").touch()
        raise_if_any("preparing", None)
        with pytest.raises(RankError) as caught:
            worker.train_in_place(config)
        said.append(str(caught.value))
    return said


def test_an_output_disk_that_is_full_ends_every_rank_with_one_sentence_about_the_first_failure(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    first, second = run_ranks(_fill_the_disk, 2, tmp_path, inputs, seconds=100)
    assert first == second
    metrics, states, end = first
    assert metrics.startswith(
        "writing the metrics of step 1 failed on rank 0: OSError: [Errno 28] No space left on dev"
    )
    assert "metrics.jsonl" in metrics and "metrics.jsonl" in end and "No space left" in end
    assert "states" in states and "failed on rank 0: NotADirectoryError" in states
    assert not any("\n" in message for message in first)


def _train_too_slowly(folder: Path, inputs: dict[str, Path]) -> str:
    config = worker.make_config(
        folder, inputs["model"], inputs["data"], optimizer={"adam": AdamConfig(lr=1e-30, betas=(0.9, 0.95))}
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        worker.train_in_place(config)
    return printed.getvalue()


def test_a_run_whose_weights_do_not_move_says_so_once(inputs: dict[str, Path], tmp_path: Path) -> None:
    # RB73
    (printed,) = run_ranks(_train_too_slowly, 1, tmp_path, inputs)
    (warning,) = [line for line in printed.splitlines() if "warning" in line]
    assert "25 of 25 trainable weights have not moved" in warning and "and 20 more" in warning


def _check_modes(folders: list[Path]) -> None:
    """Whoever the umask lets read, reads: a served model is often read by another user of the same group."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert {"model.safetensors", "config.json", "tokenizer.json", "metrics.jsonl"} <= {path.name for path in files}
    wrong = {str(path): oct(path.stat().st_mode) for path in files if path.stat().st_mode & 0o677 != 0o640}
    assert not wrong


def _check_export(folder: Path, inputs: dict[str, Path]) -> None:
    from openrlhf.data.packed_batch import pack_rows

    config = worker.make_config(folder, inputs["model"], inputs["data"], ckpt={"save_steps": 5, "save_hf": True})
    before = os.umask(0o027)
    try:
        backend = worker.train_in_place(config)
    finally:
        os.umask(before)
    _check_modes([Path(config.ckpt.output_dir), Path(config.ckpt.path)])
    rows = worker.plain_rows(inputs["model"], inputs["data"])[:3]
    batch = pack_rows([ids for ids, _ in rows], [torch.tensor(mask) for _, mask in rows])
    with torch.no_grad():
        ours = backend.forward(batch).logprobs[batch.action_mask]
    model = AutoModelForCausalLM.from_pretrained(config.ckpt.output_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(config.ckpt.output_dir)
    theirs = []
    for ids, mask in rows:
        assert tokenizer.decode(ids) == AutoTokenizer.from_pretrained(inputs["model"]).decode(ids)
        logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        theirs += [logits[place - 1, ids[place]] for place, trained in enumerate(mask) if trained]
    assert torch.allclose(ours, torch.stack(theirs), atol=1e-5)
    out = Path(config.ckpt.output_dir)
    assert "Supervised fine-tuning" in (out / "report.html").read_text()
    assert (out / "report.png").stat().st_size > 0
    assert json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["throughput/tokens_per_s"] > 0


def test_the_exported_model_answers_in_plain_transformers_as_it_did_in_training(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    run_ranks(_check_export, 1, tmp_path, inputs)
