"""The commands as users start them, on one GPU: SFT over NCCL, and RL with engine, actor and reference on one card."""

from __future__ import annotations

import gzip
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.tracking.jsonl import read_jsonl
from openrlhf.trainer.flops import peak_flops
from tests.gpu.gpu_process import needs_engine, needs_two_gpus
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900, func_only=True)]

ROOT = Path(__file__).parents[2]
REWARD = """
def reward_func(queries, prompts, labels):
    digits = [sum(c.isdigit() for c in q) / len(q) for q in queries]
    return {"rewards": digits, "scores": digits, "extra_logs": {"digits": digits}}
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model whose heads every kernel takes, sums with answers, and a reward function."""
    folder = tmp_path_factory.mktemp("inputs")
    make_tiny_model(folder / "model", "qwen3", head_dim=64)
    rows = [{"question": f"{n} + {n}", "answer": str(2 * n)} for n in range(16)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return folder


def run(command: str, flags: dict[str, object], *switches: str) -> str:
    """Runs a command to its end on the GPU. Returns: what it printed."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR", "RAY_ADDRESS")
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", f"openrlhf.cli.{command}", *words, *switches, "--device", "cuda"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout + done.stderr


def assert_measured(line: dict[str, float], *memory: str) -> None:
    """Memory is that of a tiny model, and the utilisation is there where this GPU's peak is known."""
    assert all(0 < line[name] < 8 for name in memory), line
    known = peak_flops(torch.cuda.get_device_name()) is not None
    assert ("throughput/mfu" in line) == known and 0 < line.get("throughput/mfu", 0.5) < 1, line


def assert_traced(file: Path) -> None:
    """The trace has kernels of the GPU, and the table sorts by them."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    assert "Self CUDA" in file.with_suffix("").with_suffix(".txt").read_text()


def assert_trained(before: Path, after: Path) -> None:
    """The exported model loads in plain transformers, is finite, and no matrix of it stands where it stood.

    Norms may: their weights are near 1, where bf16 is coarser than the steps of a short run.
    """
    old = AutoModelForCausalLM.from_pretrained(before, dtype=torch.bfloat16).state_dict()
    new = AutoModelForCausalLM.from_pretrained(after, dtype=torch.bfloat16).state_dict()
    assert old.keys() == new.keys()
    assert [name for name in new if not new[name].isfinite().all()] == []
    assert [name for name in new if new[name].dim() > 1 and torch.equal(old[name], new[name])] == []
    assert AutoTokenizer.from_pretrained(after).chat_template


def test_sft_trains_on_one_gpu(inputs: Path, tmp_path: Path) -> None:
    flags = {
        "model.model_name_or_path": inputs / "model",
        "data.dataset": inputs / "sums.jsonl",
        "data.input_key": "question",
        "data.output_key": "answer",
        "data.max_len": 64,
        "train.batch_size": 8,
        "train.micro_batch_size": 2,
        "train.max_epochs": 8,
        "ds.zero_stage": 2,
        "ds.param_dtype": "bf16",
        "adam.lr": 1e-2,
        "logger.profile_steps": "2:3",
        "ckpt.output_dir": tmp_path / "out",
        "ckpt.path": tmp_path / "states",
    }
    run("train_sft", flags, "--data.apply_chat_template")
    lines = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    losses = [line["loss/train"] for line in lines]
    assert len(losses) == 16 and all(map(math.isfinite, losses))
    assert losses[-1] < losses[0] - 1
    assert_trained(inputs / "model", tmp_path / "out")
    for line in lines:
        assert_measured(line, "memory/peak_gib")
    assert_traced(tmp_path / "out" / "profile" / "train_sft_rank0_steps2-3.json.gz")


@pytest.mark.parametrize("how", ["--ref.offload", "--ref.precompute"])
@pytest.mark.parametrize("stage", [2, 3])
def test_dpo_trains_on_one_gpu_beside_a_reference_or_after_it(
    inputs: Path, tmp_path: Path, how: str, stage: int
) -> None:
    rows = [{"question": f"{n} + {n}", "chosen": str(2 * n), "rejected": "red"} for n in range(16)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "model.model_name_or_path": inputs / "model",
        "data.dataset": tmp_path / "pairs.jsonl",
        "data.prompt_key": "question",
        "data.max_len": 64,
        "train.batch_size": 8,
        "train.micro_batch_size": 2,
        "train.max_epochs": 4,
        "ds.zero_stage": stage,
        "ds.param_dtype": "bf16",
        "adam.lr": 1e-2,
        "ckpt.output_dir": tmp_path / "out",
        "ckpt.path": tmp_path / "states",
    }
    run("train_dpo", flags, "--data.apply_chat_template", how)
    lines = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    losses = [line["loss/train"] for line in lines]
    assert len(losses) == 8 and all(map(math.isfinite, losses))
    # Rows are packed otherwise when they are asked about before training, which bf16 rounds otherwise.
    assert losses[0] == pytest.approx(math.log(2), abs=1e-3 if how == "--ref.offload" else 0.05)
    assert losses[-1] < 0.5 and lines[-1]["accuracy/train"] == 1
    assert_trained(inputs / "model", tmp_path / "out")
    assert_measured(lines[-1], "memory/peak_gib")


def rl_flags(inputs: Path, folder: Path) -> dict[str, object]:
    """Flags of two steps of RL on sums, actor and reference with a GPU."""
    return {
        "actor.model_name_or_path": inputs / "model",
        "reward.remote_url": inputs / "reward.py",
        "reward.workers": 1,
        "data.prompt_dataset": inputs / "sums.jsonl",
        "data.input_key": "question",
        "data.label_key": "answer",
        "data.max_len": 96,
        "rollout.max_new_tokens": 16,
        "rollout.batch_size": 8,
        "rollout.n_samples_per_prompt": 4,
        "rollout.micro_batch_size": 8,
        "train.batch_size": 16,
        "train.micro_batch_size": 4,
        "actor.num_gpus_per_node": 1,
        "ref.num_gpus_per_node": 1,
        "vllm.num_engines": 1,
        "vllm.gpu_memory_utilization": 0.3,
        "algo.advantage.estimator": "reinforce_baseline",
        "algo.kl.estimator": "k2",
        "actor.adam.lr": 1e-3,
        "ds.param_dtype": "bf16",
        "ckpt.output_dir": folder / "out",
        "ckpt.path": folder / "states",
    }


def assert_rl_trained(inputs: Path, out: Path) -> None:
    """Two steps went as they should, and the exported model is another one."""
    lines = read_jsonl(out / "metrics.jsonl")
    assert len(lines) == 2
    for line in lines:
        assert line["reward/failed"] == 0 and line["rollout/samples"] == 32 and line["actor/updates"] == 2
        assert all(math.isfinite(line[name]) for name in ("reward/mean", "policy/loss", "actor/grad_norm"))
        # After each transfer the engine holds the trainer's model, up to the rounding of bf16.
        assert line["sync/logprob_gap"] < 0.05
        assert_measured(line, "memory/actor_gib", "memory/ref_gib")
    assert lines[0]["kl/reference"] == pytest.approx(0, abs=1e-3)
    assert_trained(inputs / "model", out)


@needs_engine
def test_rl_trains_with_two_engines_actor_and_reference_on_one_gpu(inputs: Path, tmp_path: Path) -> None:
    two = {"vllm.num_engines": 2, "vllm.gpu_memory_utilization": 0.2}
    switches = ["--data.apply_chat_template", "--algo.kl.use_loss", "--vllm.enforce_eager", "--train.colocate_all"]
    said = run("train_ppo_ray", rl_flags(inputs, tmp_path) | two, *switches, "--vllm.enable_sleep")
    assert "becomes ipc" in said
    assert_rl_trained(inputs, tmp_path / "out")


@needs_engine
@pytest.mark.parametrize("sleeps", [True, False], ids=["in turns", "side by side"])
def test_rl_trains_with_engine_actor_and_reference_on_one_gpu(inputs: Path, tmp_path: Path, sleeps: bool) -> None:
    switches = ["--data.apply_chat_template", "--train.colocate_all", "--algo.kl.use_loss", "--vllm.enforce_eager"]
    if sleeps:
        switches += ["--vllm.enable_sleep", "--ds.enable_sleep"]
    said = run("train_ppo_ray", rl_flags(inputs, tmp_path) | {"logger.profile_steps": "2"}, *switches)
    assert "becomes ipc" in said
    assert_rl_trained(inputs, tmp_path / "out")
    assert_traced(tmp_path / "out" / "profile" / "actor_rank0_steps2-2.json.gz")


@needs_engine
@needs_two_gpus
@pytest.mark.parametrize(
    ("flags", "switches", "transport"),
    [
        ({}, ["--train.colocate_actor_ref"], "nccl"),
        (
            {"actor.num_gpus_per_node": 2, "ref.num_gpus_per_node": 2, "vllm.tensor_parallel_size": 2},
            ["--train.colocate_all", "--vllm.enable_sleep", "--ds.enable_sleep"],
            "ipc",
        ),
        (
            {"actor.num_gpus_per_node": 2, "ref.num_gpus_per_node": 2, "vllm.num_engines": 2, "ds.zero_stage": 3},
            ["--train.colocate_all", "--vllm.enable_sleep", "--ds.enable_sleep"],
            "ipc",
        ),
    ],
    ids=["engine apart", "an engine over both", "two engines, ZeRO 3"],
)
def test_rl_trains_on_two_gpus(
    inputs: Path, tmp_path: Path, flags: dict[str, object], switches: list[str], transport: str
) -> None:
    common = ["--data.apply_chat_template", "--algo.kl.use_loss", "--vllm.enforce_eager"]
    said = run("train_ppo_ray", rl_flags(inputs, tmp_path) | flags, *common, *switches)
    assert ("becomes ipc" in said) == (transport == "ipc")
    assert_rl_trained(inputs, tmp_path / "out")
