"""The train_sft command as users start it: alone, under deepspeed and under torchrun; stopped and resumed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoTokenizer

from openrlhf.backends.checkpoints import CheckpointStore
from openrlhf.tracking.jsonl import read_jsonl
from tests.integration.sft_worker import exported, largest_difference
from tests.tiny_models import make_tiny_model

BIN = Path(sys.executable).parent
ALONE = [sys.executable, "-m", "openrlhf.cli.train_sft"]
DEEPSPEED = [str(BIN / "deepspeed"), "--num_gpus", "2", "--module", "openrlhf.cli.train_sft"]
TORCHRUN = [str(BIN / "torchrun"), "--nproc_per_node", "2", "-m", "openrlhf.cli.train_sft"]
ROOT = Path(__file__).parents[2]
# Rows that a process of their own tokenises ahead, in place of all at the start.
STREAMED = ["--data.streaming", "--data.dataloader_num_workers", "1"]
EPOCHS, STEPS = 10, 30
TIMEOUT_S = 240
# How long a run may outlive one of its ranks.
GONE_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and conversations of two assistant turns."""
    folder = tmp_path_factory.mktemp("cli")
    make_tiny_model(folder / "model", "qwen2")
    rng = random.Random(0)
    with (folder / "talks.jsonl").open("w") as file:
        for _ in range(22):
            a, b = rng.randint(0, 99), rng.randint(0, 99)
            turns = [("user", f"{a} + {b}"), ("assistant", str(a + b)), ("user", "again"), ("assistant", str(a + b))]
            file.write(json.dumps({"talk": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    return folder


def flags(folder: Path, name: str) -> list[str]:
    pairs = {
        "model.model_name_or_path": folder / "model",
        "data.dataset": folder / "talks.jsonl",
        "data.input_key": "talk",
        "train.batch_size": 8,
        "train.micro_batch_size": 2,
        "train.max_epochs": EPOCHS,
        "ds.param_dtype": "fp32",
        "adam.lr": 1e-3,
        "adam.eps": 1e-5,
        "ckpt.output_dir": folder / name,
        "ckpt.path": folder / f"{name}_states",
        "ckpt.save_steps": 10,
        "logger.logging_steps": 5,
    }
    words = ["--data.apply_chat_template", "--data.multiturn", "--ckpt.load_enable", "--device", "cpu"]
    return words + [word for flag, value in pairs.items() for word in (f"--{flag}", str(value))]


def start(command: list[str], words: list[str], port: int) -> subprocess.Popen:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    if command != ALONE:
        command = [command[0], f"--master_port={port}", *command[1:]]
    return subprocess.Popen(
        [*command, *words],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def family_of(process: subprocess.Popen) -> list[psutil.Process]:
    """A launcher with its ranks, which may stand in sessions of their own."""
    if process.poll() is not None:
        return []
    launcher = psutil.Process(process.pid)
    return [*launcher.children(recursive=True), launcher]


def kill(process: subprocess.Popen, family: list[psutil.Process] | None = None) -> None:
    """Kills a launcher with its ranks, or what is left of a family that was looked up before."""
    family = family_of(process) if family is None else family
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=30)
    process.communicate()


def finish(process: subprocess.Popen) -> str:
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        kill(process)
        raise
    assert process.returncode == 0, output
    return output


def wait_for_checkpoint(process: subprocess.Popen, states: Path) -> None:
    """Returns as soon as there is a checkpoint that was not there before."""
    store = CheckpointStore(states, max_num=1, max_mem_gb=1)
    before, deadline = store.latest(), time.monotonic() + TIMEOUT_S
    while store.latest() == before:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"nothing was written to {states} in {TIMEOUT_S} s"
        time.sleep(0.01)


def kill_after_checkpoint(process: subprocess.Popen, states: Path) -> None:
    try:
        wait_for_checkpoint(process, states)
    finally:
        kill(process)


def kill_a_rank_after_checkpoint(process: subprocess.Popen, states: Path, rank: int) -> None:
    """Kills one rank of a launcher and sees to it that nothing of the run is left a minute later."""
    family = None
    try:
        wait_for_checkpoint(process, states)
        family = family_of(process)
        # The rank is older than what it forked.
        its_own = [member for member in family if member.environ().get("RANK") == str(rank)]
        min(its_own, key=psutil.Process.create_time).kill()
        deadline = time.monotonic() + GONE_S
        process.communicate(timeout=GONE_S)
        assert process.returncode != 0
        _, left = psutil.wait_procs(family, timeout=max(0.0, deadline - time.monotonic()))
        assert not left
    finally:
        kill(process, family)


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss/train"]) for line in read_jsonl(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def alone(folder: Path) -> str:
    """What the command printed, run to the end in one process."""
    trackers = ["--logger.tensorboard_dir", str(folder / "tensorboard"), "--logger.wandb.key", "offline"]
    return finish(start(ALONE, flags(folder, "alone") + trackers, 0))


def test_one_process_trains_and_leaves_model_tokenizer_metrics_and_report(folder: Path, alone: str) -> None:
    out = folder / "alone"
    assert "training data: 22 rows" in alone and "step 30/30" in alone and "report.html" in alone
    assert [step for step, _ in losses(out)] == [5, 10, 15, 20, 25, 30]
    assert losses(out)[-1][1] < losses(out)[0][1] - 1
    assert AutoTokenizer.from_pretrained(out).chat_template
    tokenizer = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    assert [(out / name).read_bytes() for name in tokenizer] == [
        (folder / "model" / name).read_bytes() for name in tokenizer
    ]
    assert "multiturn: true" in (out / "config.yaml").read_text()
    assert (out / "report.html").exists() and (out / "report.png").exists()
    assert list((folder / "tensorboard").rglob("events.*"))
    assert list((out / "wandb").glob("offline-run-*"))
    assert sorted(path.name for path in (folder / "alone_states").iterdir()) == [
        "global_step10",
        "global_step20",
        "global_step30",
        "latest",
    ]


def test_runs_that_lose_a_rank_end_within_a_minute_and_resumed_they_learn_what_one_process_learns(
    folder: Path, alone: str
) -> None:
    """Sums over ranks round differently, so the runs agree closely and not to the bit."""
    states, words = folder / "pair_states", [*flags(folder, "pair"), "--ckpt.save_steps", "5", *STREAMED]
    kill_a_rank_after_checkpoint(start(TORCHRUN, words, 29611), states, rank=1)
    kill_a_rank_after_checkpoint(start(DEEPSPEED, words, 29612), states, rank=0)
    assert not (folder / "pair" / "model.safetensors").exists()
    output = finish(start(DEEPSPEED, words, 29613))
    assert "going on after step" in output
    assert [step for step, _ in losses(folder / "pair")] == [5, 10, 15, 20, 25, 30]
    for (_, pair), (_, single) in zip(losses(folder / "pair"), losses(folder / "alone"), strict=True):
        assert pair == pytest.approx(single, abs=1e-4)
    assert largest_difference(exported(folder / "pair"), exported(folder / "alone")) < 1e-4


def test_one_process_killed_and_resumed_ends_bit_for_bit_where_an_unbroken_run_does(folder: Path, alone: str) -> None:
    words = [*flags(folder, "broken"), *STREAMED, "--logger.tensorboard_dir", str(folder / "curves")]
    kill_after_checkpoint(start(ALONE, [*words, "--logger.wandb.run_name", "first"], 0), folder / "broken_states")
    assert not (folder / "broken" / "model.safetensors").exists()
    assert re.search(r"training data: \d+ rows were met, 0 of them cut, 0 left out", finish(start(ALONE, words, 0)))
    assert losses(folder / "broken") == losses(folder / "alone")
    resumed, whole = exported(folder / "broken"), exported(folder / "alone")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    # One curve, in the folder of the run that was stopped.
    assert [path.name for path in (folder / "curves").iterdir()] == ["first"]


def test_a_run_that_a_scheduler_ends_leaves_whole_files_no_lock_and_one_line(folder: Path) -> None:
    words = [*flags(folder, "ended"), "--train.max_epochs", "10000", "--logger.logging_steps", "1", *STREAMED]
    process = start(ALONE, words, 0)
    try:
        wait_for_checkpoint(process, folder / "ended_states")
        assert (folder / "ended" / ".lock").read_text().startswith(f"{process.pid} ")
        second = subprocess.run(
            [*ALONE, *flags(folder, "ended")], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert second.returncode == 2
        assert f"another run (process {process.pid} on" in second.stderr and "Traceback" not in second.stderr
        process.terminate()
        output, _ = process.communicate(timeout=GONE_S)
    finally:
        kill(process)
    assert process.returncode == 143
    assert output.splitlines()[-1] == "openrlhf train_sft: terminated" and "Traceback" not in output
    assert not (folder / "ended" / ".lock").exists()
    assert (folder / "ended" / "report.html").exists()
    steps = [step for step, _ in losses(folder / "ended")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 10


def test_a_finished_run_that_is_started_again_says_that_nothing_is_left_and_keeps_its_model(
    folder: Path, alone: str
) -> None:
    before, lines = exported(folder / "alone"), losses(folder / "alone")
    output = finish(start(ALONE, flags(folder, "alone"), 0))
    assert "nothing is left to train: the checkpoint stands at the last of 30 steps" in output
    after = exported(folder / "alone")
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert losses(folder / "alone") == lines
