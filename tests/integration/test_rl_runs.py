"""Whole RL runs: what they leave behind, what they survive, and how they end when a part of them dies."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, OpenAIGPTConfig

from openrlhf.tracking.jsonl import read_jsonl
from tests.integration import rl_runs as runs
from tests.tiny_models import make_tiny_model, make_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ANOTHER_MODEL = "probably vLLM computes another model from this config.json"

# One label a fault; every other sample is rewarded as usual.
FAULTY_REWARD = (
    runs.REWARD
    + """
import time
usual = reward_func

def reward_func(queries, prompts, labels):
    if labels[0] == "raise":
        raise KeyError("no such test case")
    if labels[0] == "hang":
        time.sleep(3600)
    if labels[0] == "length":
        return {"rewards": [1.0, 2.0, 3.0]}
    if labels[0] == "nan":
        return float("nan")
    return usual(queries, prompts, labels)
"""
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rl")
    (folder / "reward.py").write_text(runs.REWARD)
    return {
        "model": make_tiny_model(folder / "model", "qwen2", hidden=128),
        "prompts": runs.write_prompts(folder / "prompts.jsonl"),
        "reward": folder / "reward.py",
    }


def test_a_run_survives_bad_rewards_and_long_prompts_counts_them_and_exports_a_model(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    rows = [{"question": f"what is {n} + {n} ?", "sum": 2 * n} for n in range(3)]
    rows += [{"question": "hello", "sum": fault} for fault in ("raise", "hang", "length", "nan")]
    rows.append({"question": "one two three four five " * 60, "sum": 1})
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(FAULTY_REWARD)
    flags = [
        "--actor.num_gpus_per_node",
        "2",
        "--vllm.num_engines",
        "2",
        "--ds.zero_stage",
        "3",
        "--ref.num_gpus_per_node",
        "2",
    ]
    flags += ["--reward.timeout", "8", "--reward.max_retries", "0", "--reward.workers", "4"]
    flags += [
        "--rollout.save_samples",
        "32",
        "--rollout.batch_size",
        "8",
        "--rollout.top_p",
        "0.9",
        "--rollout.temperature",
        "0.6",
    ]
    flags += ["--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "200", "--train.num_episodes", "2"]
    flags += ["--algo.kl.use_loss", "--algo.kl.estimator", "k3", "--train.max_epochs", "2", "--train.colocate_all"]
    arguments = runs.command(tmp_path, inputs["model"], tmp_path / "prompts.jsonl", tmp_path / "reward.py", *flags)
    run = runs.finish(tmp_path, arguments)
    assert run.process.returncode == 0, run.text()[-4000:]
    assert ANOTHER_MODEL not in run.text()

    first, second = runs.metrics(tmp_path)
    assert first["rollout/samples"] == 32 and first["reward/failed"] == 16
    assert first["rollout/prompt_cut"] == 4
    assert first["actor/updates"] == 4  # 16 samples with a reward, batches of 8, two epochs
    assert first["kl/reference"] == pytest.approx(0, abs=1e-6)
    assert second["kl/reference"] > 1e-6
    for line in (first, second):
        assert line["sync/logprob_gap_max"] < 1e-5
    samples = read_jsonl(tmp_path / "out" / "rollouts.jsonl")
    reasons = Counter(sample["failure"] for sample in samples if sample["failure"])
    assert {"no such test case", "8 s", "found 3", "nan"} == {
        part for reason in reasons for part in ("no such test case", "8 s", "found 3", "nan") if part in reason
    }, reasons
    assert (tmp_path / "out" / "report.html").is_file() and (tmp_path / "out" / "report.png").is_file()

    before = AutoModelForCausalLM.from_pretrained(inputs["model"], dtype=torch.float32).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    still = [name for name in before if torch.equal(before[name], after[name])]
    assert not still, f"never moved: {still}"
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_a_resumed_run_goes_on_bit_for_bit_as_the_one_that_was_not_stopped(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    flags = ["--ckpt.save_steps", "1", "--ckpt.max_num", "9", "--ckpt.load_enable", "--train.num_episodes", "2"]
    arguments = runs.command(tmp_path, inputs["model"], inputs["prompts"], inputs["reward"], *flags)
    whole = runs.finish(tmp_path, arguments)
    assert whole.process.returncode == 0, whole.text()[-4000:]
    lines = runs.metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    samples = read_jsonl(tmp_path / "out" / "rollouts.jsonl")
    # As if the run had been stopped in the second episode, before its fifth step was saved.
    for step in (5, 6):
        shutil.rmtree(tmp_path / "states" / "_actor" / f"global_step{step}")
    resumed = runs.finish(tmp_path, arguments)
    assert resumed.process.returncode == 0, resumed.text()[-4000:]
    assert "resuming after step 4" in resumed.text()
    assert runs.repeated(runs.metrics(tmp_path)) == runs.repeated(lines)
    assert read_jsonl(tmp_path / "out" / "rollouts.jsonl") == samples
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(again[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("title", "named"),
    [
        ("ray::RolloutActor", "rollout engine 0"),
        ("VLLM::Worker", "rollout engine 0"),
        ("ray::TrainWorker", "actor worker"),
        ("driver", None),
    ],
)
def test_a_killed_part_ends_the_run_within_a_minute_names_it_and_leaves_nothing_behind(
    inputs: dict[str, Path], tmp_path: Path, title: str, named: str | None
) -> None:
    flags = ["--train.num_episodes", "1000", "--algo.kl.init_coef", "0", "--actor.num_gpus_per_node", "2"]
    arguments = runs.command(tmp_path, inputs["model"], inputs["prompts"], inputs["reward"], *flags)
    with runs.running(tmp_path, arguments) as run:
        run.wait_for("step    2/")
        family, files = run.family(), run.engine_files()
        assert any("psm_" in path.name for path in files) and all(path.exists() for path in files)
        victim = family[0] if named is None else run.member(title)
        victim.send_signal(signal.SIGKILL)
        code = run.process.wait(runs.END_SECONDS)
        assert runs.all_gone(family, runs.END_SECONDS) == []
        # The process that cleans up after the driver goes last.
        assert runs.left_behind(files, 20) == []
        if named is not None:
            assert code == 1
            last = run.text().strip().splitlines()[-1]
            # A worker that was talking to the dead one at that moment may be the first to speak, and names it too.
            assert last.startswith("openrlhf train_ppo_ray: ") and named in last, run.text()[-3000:]
    assert [line["step"] for line in runs.metrics(tmp_path)][:2] == [1, 2]


@pytest.mark.parametrize("whole_group", [False, True], ids=["the run alone", "its process group, Ray's head included"])
def test_a_run_that_is_told_to_end_unwinds_and_leaves_neither_processes_nor_shared_memory_nor_a_lock(
    inputs: dict[str, Path], tmp_path: Path, whole_group: bool
) -> None:
    flags = ["--train.num_episodes", "1000", "--algo.kl.init_coef", "0"]
    arguments = runs.command(tmp_path, inputs["model"], inputs["prompts"], inputs["reward"], *flags)
    with runs.running(tmp_path, [*["setsid"] * whole_group, *arguments]) as run:
        run.wait_for("step    2/")
        assert (tmp_path / "out" / ".lock").exists()
        # Other tests make and kill engines beside this one, so what is left of this run is looked for by name.
        family, files = run.family(), [*run.engine_files(), *run.shared_memory()]
        assert any(path.name.startswith("psm_") for path in files)
        if whole_group:
            # As `timeout` does, and whoever ends a job with all that it has started.
            os.killpg(run.process.pid, signal.SIGTERM)
        else:
            family[0].send_signal(signal.SIGTERM)
        assert run.process.wait(runs.END_SECONDS) == 143
        assert runs.all_gone(family, runs.END_SECONDS) == []
        assert runs.left_behind(files, 20) == []
    assert not (tmp_path / "out" / ".lock").exists()
    assert (tmp_path / "out" / "report.html").exists()
    last = run.text().strip().splitlines()[-1]
    assert last == "openrlhf train_ppo_ray: terminated" and "Traceback" not in run.text(), run.text()[-3000:]


def test_a_model_that_vllm_reads_otherwise_than_transformers_is_told(inputs: dict[str, Path], tmp_path: Path) -> None:
    # vLLM's Qwen2 takes no head_dim from the config, and of weights that are twice as large the first half.
    model = make_tiny_model(tmp_path / "model", "qwen2", hidden=128, head_dim=64)
    prompts = runs.write_prompts(tmp_path / "prompts.jsonl", 4)
    arguments = runs.command(tmp_path, model, prompts, inputs["reward"], "--algo.kl.init_coef", "0")
    run = runs.finish(tmp_path, arguments)
    assert run.process.returncode == 0 and run.text().count(ANOTHER_MODEL) == 1, run.text()[-3000:]


@pytest.mark.skipif(not runs.is_root(), reason="needs root, to mount a small file system that fills up")
def test_a_full_disk_at_checkpoint_time_ends_the_run_and_leaves_the_checkpoint_before(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    # A state of this model takes about 5 MB: one fits, a second beside it does not.
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("this machine lets nobody mount a file system")
    try:
        flags = ["--ckpt.path", str(disk), "--ckpt.save_steps", "1", "--algo.kl.init_coef", "0"]
        arguments = runs.command(tmp_path, inputs["model"], inputs["prompts"], inputs["reward"], *flags)
        run = runs.finish(tmp_path, arguments)
        assert run.process.returncode == 1, run.text()[-4000:]
        last = run.text().strip().splitlines()[-1]
        assert "global_step2" in last and "No space left" in last, last
        assert sorted(path.name for path in (disk / "_actor").iterdir()) == ["global_step1", "latest"]
        assert len(runs.metrics(tmp_path)) == 2
        more = runs.command(tmp_path, inputs["model"], inputs["prompts"], inputs["reward"], *flags[2:])
        more += ["--ckpt.path", str(disk), "--ckpt.load_enable", "--ckpt.save_steps", "-1"]
        resumed = runs.finish(tmp_path, more)
        assert resumed.process.returncode == 0 and "resuming after step 1" in resumed.text()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        # The first is refused by the process that starts the engine, the second falls in one of the engine's own.
        ("other", r"could not start with the model \S+/other: .*OpenAIGPTLMHeadModel.* not supported for now\.$"),
        ("narrow", r"a process of the engine has ended: .*Unsupported CPU attention configuration: head_dim=16"),
    ],
)
def test_an_engine_that_cannot_run_the_model_says_why_in_the_last_line(
    inputs: dict[str, Path], tmp_path: Path, model: str, said: str
) -> None:
    if model == "other":
        config = OpenAIGPTConfig(vocab_size=512, n_positions=128, n_embd=128, n_layer=2, n_head=2)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / model)
        make_tokenizer().save_pretrained(tmp_path / model)
    else:
        make_tiny_model(tmp_path / model, "qwen2", hidden=64)
    flags = ("--algo.kl.init_coef", "0")
    run = runs.finish(
        tmp_path, runs.command(tmp_path, tmp_path / model, inputs["prompts"], inputs["reward"], *flags), seconds=240
    )
    assert run.process.returncode == 1
    last = run.text().strip().splitlines()[-1]
    # Whoever sees it first tells it: the call that fails, or the watch over the engine's processes.
    assert re.match("openrlhf train_ppo_ray: rollout engine 0 (failed|died): ", last), run.text()[-3000:]
    assert re.search(said, last), last


def test_an_empty_data_set_ends_the_command_with_one_sentence(inputs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    run = runs.finish(
        tmp_path, runs.command(tmp_path, inputs["model"], tmp_path / "empty.jsonl", inputs["reward"]), seconds=120
    )
    assert run.process.returncode == 2
    assert "Traceback" not in run.text() and "empty.jsonl" in run.text().strip().splitlines()[-1]
