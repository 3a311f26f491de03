"""The dry run's arithmetic, and its plans of real small models and data."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from openrlhf.cli.common import run_command
from openrlhf.config import DeepSpeedConfig
from openrlhf.config.plan import (
    GIB,
    ModelFacts,
    Plan,
    count_words,
    inference_memory,
    memory_rows,
    size_words,
    training_memory,
)
from tests.unit.config_args import words

SMALL = ModelFacts(parameters=1000, hidden=10, layers=4, vocab=100, context=2048)


def train(facts=SMALL, *, ranks=2, tokens=8, checkpointing=False, **ds):
    return training_memory(facts, DeepSpeedConfig(**ds), ranks=ranks, tokens=tokens, checkpointing=checkpointing)


@pytest.mark.parametrize(
    ("stage", "dtype", "weights", "gradients", "optimizer"),
    [
        (0, "fp32", 4000, 4000, 8000),
        (0, "bf16", 2000, 4000, 6000),
        (1, "bf16", 2000, 4000, 6000),
        (2, "bf16", 2000, 2000, 6000),
        (3, "bf16", 1000, 2000, 6000),
        (3, "fp32", 2000, 2000, 4000),
    ],
)
def test_each_stage_shards_one_part_more(stage, dtype, weights, gradients, optimizer):
    parts = train(zero_stage=stage, param_dtype=dtype)
    assert (parts["weights"], parts["gradients"], parts["optimizer"]) == (weights, gradients, optimizer)


def test_adapters_alone_have_gradients_and_an_optimizer_over_weights_that_may_be_in_four_bits():
    parts = train(replace(SMALL, adapters=40), zero_stage=2)
    assert (parts["weights"], parts["gradients"], parts["optimizer"]) == (2080, 80, 240)
    packed = train(replace(SMALL, adapters=40, packed=800), zero_stage=2)
    assert packed["weights"] == pytest.approx(2 * 240 + 800 * 4.127 / 8) and packed["optimizer"] == 240


def test_activations_grow_with_tokens_and_shrink_with_checkpointing():
    assert train(tokens=8)["activations"] == 34 * 8 * 10 * 4
    assert train(tokens=16)["activations"] == 2 * train(tokens=8)["activations"]
    assert train(tokens=8, checkpointing=True)["activations"] == 2 * 8 * 10 * 4 + 34 * 8 * 10
    assert train(tokens=8, param_dtype="fp32")["activations"] == 2 * train(tokens=8)["activations"]


def test_logits_are_bounded_by_their_chunks():
    assert train(tokens=8)["logits"] == 3 * 4 * 8 * 100
    wide = ModelFacts(parameters=1, hidden=1, layers=1, vocab=150_000, context=None)
    assert train(wide, tokens=100_000)["logits"] == 0.75 * GIB


def test_a_model_that_only_answers_has_no_gradients():
    parts = inference_memory(SMALL, DeepSpeedConfig(zero_stage=2), ranks=2, tokens=8)
    assert parts == {"weights": 2000, "activations": 34 * 8 * 10, "logits": 3 * 4 * 8 * 100}
    assert inference_memory(SMALL, DeepSpeedConfig(zero_stage=3), ranks=2, tokens=8)["weights"] == 1000


def test_sizes_and_counts_are_readable():
    assert [size_words(x) for x in (1.5 * GIB, 5 * 2**20)] == ["1.5 GiB", "5.0 MiB"]
    assert [count_words(x) for x in (8.03e9, 135e6, 860_000, 1200, 12)] == ["8.03B", "135.00M", "0.86M", "1.20k", "12"]


def test_columns_of_the_plan_are_aligned():
    plan = Plan("Plan")
    plan.add("memory", memory_rows({"actor": {"weights": 2**20}, "engine": {"weights": 2**21, "KV cache": 2**30}}))
    assert plan.text().splitlines()[2:] == [
        "memory",
        "              actor   engine",
        "  weights   1.0 MiB  2.0 MiB",
        "  KV cache        -  1.0 GiB",
        "  together  1.0 MiB  1.0 GiB",
    ]


# Plans of real models and data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tests.tiny_models import make_tiny_model

    folder = tmp_path_factory.mktemp("plan")
    make_tiny_model(folder / "model")
    rows = [{"input": f"what is {i} + 1 ?", "output": str(i + 1)} for i in range(100)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': [0.0]}\n")
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


RL = {
    "--actor.model_name_or_path": "./model",
    "--actor.num_gpus_per_node": "2",
    "--ref.num_gpus_per_node": "1",
    "--reward.remote_url": "reward.py",
    "--data.prompt_dataset": "rows.jsonl",
    "--data.label_key": "output",
    "--data.max_len": "128",
    "--rollout.max_new_tokens": "123",
    "--rollout.batch_size": "32",
    "--rollout.n_samples_per_prompt": "2",
    "--train.batch_size": "24",
    "--algo.advantage.estimator": "rloo",
    "--device": "cpu",
}
SFT = {
    "--model.model_name_or_path": "./model",
    "--data.dataset": "rows.jsonl",
    "--data.output_key": "output",
    "--data.max_len": "64",
    "--train.batch_size": "16",
    "--device": "cpu",
}


def lines_of(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_plan_of_rl_says_what_a_step_is(here, capsys):
    run_command("train_ppo_ray", None, words(RL, "--dry_run"))
    lines = lines_of(capsys.readouterr().out)

    assert lines[0] == "Plan of train_ppo_ray (nothing was started)"
    assert "data.prompt_dataset rows.jsonl: 100 rows" in lines
    assert "columns input, output" in lines
    assert "samples a step 32 prompts x 2 = 64" in lines
    assert "updates a step 3 of 21 to 22 samples" in lines
    assert "steps 4" in lines
    # Three whole rollouts of 64 samples make 3 updates each, the last one of 8 makes 1.
    assert "updates in all 10" in lines
    assert "together 4 CPU places, of any number on this machine" in lines
    assert any(line.startswith("first 100 prompts 9 tokens in the middle") for line in lines)
    assert any("100 longer than the 5 that fit" in line for line in lines)
    assert "actor ref engine" in lines


def test_plan_of_rl_shares_places_and_leaves_out_what_is_not_started(here, capsys):
    extra = ["--train.colocate_all", "--vllm.num_engines", "2", "--algo.kl.init_coef", "0", "--dry_run"]
    run_command("train_ppo_ray", None, words(RL, *extra))
    lines = lines_of(capsys.readouterr().out)

    assert "actor + engine 2 CPU places" in lines
    assert "actor engine" in lines


def test_plan_of_sft_says_what_an_epoch_is(here, capsys):
    run_command("train_sft", None, words(SFT, "--eval.dataset", "rows.jsonl", "--eval.steps", "5", "--dry_run"))
    lines = lines_of(capsys.readouterr().out)

    assert "updates an epoch 7 of 14 to 15 rows" in lines
    assert "updates in all 14" in lines
    assert "eval.dataset rows.jsonl: 100 rows" in lines


def test_plan_with_adapters_says_what_is_trained_written_and_asked(here, capsys, bitsandbytes_is_found):
    adapters = ["--ds.lora.rank", "4", "--ds.load_in_4bit", "--ds.param_dtype", "bf16", "--dry_run"]
    run_command("train_sft", None, words(SFT, *adapters))
    lines = lines_of(capsys.readouterr().out)
    assert any(re.fullmatch(r"trained \S+ parameters of adapters of rank 4, over weights in nf4", x) for x in lines)
    assert any(line.startswith("adapter (merge it with openrlhf lora_combiner), metrics ") for line in lines)

    pairs = "".join('{"q": "1 + 1", "chosen": "2", "rejected": "3"}\n' for _ in range(300))
    Path("pairs.jsonl").write_text(pairs)
    dpo = {**SFT, "--data.dataset": "pairs.jsonl", "--data.prompt_key": "q"}
    dpo.pop("--data.output_key", None)
    dpo.pop("--data.input_key", None)
    run_command("train_dpo", None, words(dpo, *adapters))
    lines = lines_of(capsys.readouterr().out)
    assert "kind the trained model with its adapters off: no memory of its own" in lines
    assert "reference" in lines and "model" in lines and "model reference" not in lines


def test_plan_is_printed_by_one_rank(here, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    run_command("train_sft", None, words(SFT, "--dry_run"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("command", "base", "extra", "said"),
    [
        ("train_sft", SFT, ["--data.output_key", "answer"], "rows.jsonl, row 1: there is no column 'answer'"),
        ("train_ppo_ray", RL, ["--data.input_key", "text"], "rows.jsonl, row 1: there is no column 'text'"),
        ("train_sft", SFT, ["--data.dataset", "missing.jsonl"], "missing.jsonl: there is no such file"),
        ("train_sft", SFT, ["--data.max_len", "4096"], "--data.max_len 4096 is longer than the 2048 tokens"),
        ("train_ppo_ray", RL, ["--data.max_len", "4096"], "--data.max_len 4096 is longer than the 2048 tokens"),
    ],
)
def test_what_the_run_would_fail_on_ends_the_dry_run(here, capsys, command, base, extra, said):
    with pytest.raises(SystemExit) as caught:
        run_command(command, None, words(base, *extra, "--dry_run"))

    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_folder_that_holds_no_model_is_named(here, folder, capsys):
    (folder / "broken").mkdir(exist_ok=True)
    (folder / "broken" / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        run_command("train_sft", None, words(SFT, "--model.model_name_or_path", "./broken", "--dry_run"))
    message = f"no model can be loaded from {folder / 'broken'}: ValueError: Unrecognized model"
    assert message in capsys.readouterr().err
