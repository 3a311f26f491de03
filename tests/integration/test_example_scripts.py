"""The scripts of examples/scripts: as they stand for GPUs, and run with tiny models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.agents.reward_values import RewardResult
from openrlhf.config import Config, check, device_notes, notes, parse
from openrlhf.tracking.jsonl import read_jsonl
from tests.reward_files import score_many

SCRIPTS = Path(__file__).parents[2] / "examples/scripts"
HYBRID, REWARD_FN = "train_ppo_ray_hybrid_engine.sh", "train_ppo_with_reward_fn.sh"
REWARD_MODEL, DPO, SERVER = "train_rm.sh", "train_dpo_llama.sh", "serve_remote_rm.sh"


def run_script(name: str, folder: Path, *words: str, first_on_path: Path) -> subprocess.CompletedProcess[str]:
    """Runs a script in ``folder``; its python3 is the one in ``first_on_path``."""
    return subprocess.run(
        ["bash", str(SCRIPTS / name), *words],
        cwd=folder,
        env={**os.environ, "PATH": f"{first_on_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=420,
    )


def gpu_config(name: str, folder: Path, *words: str, command: str = "train_ppo_ray") -> Config:
    """The checked config of a script's command, whose words the shell has put together."""
    shell = folder / "bin" / "python3"
    shell.parent.mkdir()
    shell.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    shell.chmod(0o755)
    done = run_script(name, folder, *words, first_on_path=shell.parent)
    assert done.returncode == 0, done.stderr
    given = done.stdout.split("\0")[:-1]
    start = given.index(f"openrlhf.cli.{command}")
    assert given[start - 1] == "-m"
    launcher, flags = given[: start - 1], given[start + 1 :]
    assert launcher in ([], ["-m", "torch.distributed.run", "--nproc_per_node", os.environ.get("GPUS", "8")])
    # Written in the flags' own names, each of which matters in this run.
    said: list[str] = []
    config = parse(command, flags, note=said.append)
    check(config)
    assert said + notes(config) == []
    return config


def test_the_hybrid_engine_puts_all_models_and_engines_on_the_gpus_that_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUS", "4")
    config = gpu_config(HYBRID, tmp_path, "--dry_run", "--train.batch_size", "64")
    groups = (config.actor, config.ref, config.critic, config.reward)
    assert {group.world_size for group in groups} == {4} == {config.vllm.num_engines}
    assert config.train.colocate_all and config.has_critic and config.reward_models and config.algo.kl.enabled
    assert config.device == "cuda" and config.dry_run and config.train.batch_size == 64
    assert device_notes(config, "cuda") == []


def test_the_reward_function_trains_on_half_of_eight_gpus_and_generates_on_the_others(tmp_path: Path) -> None:
    config = gpu_config(REWARD_FN, tmp_path)
    assert config.actor.world_size == config.ref.world_size == config.vllm.num_engines == 4
    assert config.train.colocate_actor_ref and not config.has_critic and config.algo.dynamic_filtering_enable
    assert config.device == "cuda" and config.eval.dataset == config.data.prompt_dataset


def test_the_reward_model_shards_an_8b_model_over_the_gpus_and_goes_on_from_its_states(tmp_path: Path) -> None:
    config = gpu_config(REWARD_MODEL, tmp_path, "--model.margin_loss_enable", command="train_rm")
    assert config.ds.zero_stage == 3 and config.ckpt.load_enable and config.ckpt.save_steps == 50
    assert config.data.apply_chat_template and config.data.prompt_key is None and config.model.margin_loss_enable
    assert device_notes(config, "cuda") == []


def test_dpo_computes_what_its_reference_says_once_and_shards_an_8b_model_over_the_gpus(tmp_path: Path) -> None:
    config = gpu_config(DPO, tmp_path, command="train_dpo")
    assert config.model.loss == "dpo" and config.ref.precompute and config.ref.model_name_or_path is None
    assert config.ds.zero_stage == 3 and config.ckpt.load_enable and config.data.apply_chat_template
    assert device_notes(config, "cuda") == []


def test_the_server_serves_an_8b_reward_model_on_one_gpu_to_this_machine_alone(tmp_path: Path) -> None:
    config = gpu_config(SERVER, tmp_path, "--batch_size", "16", command="serve_rm")
    assert config.device == "cuda" and config.host == "127.0.0.1" and config.port == 5000
    assert config.reward.normalize_enable and config.batch_size == 16


def test_the_reward_reads_the_last_number_of_answer_and_label() -> None:
    answers = ["It is 1,234.", "First 12, then 7", "none", "1234.0"]
    labels = ["by adding\n#### 1234", "07", "5", "1234"]
    found = score_many(SCRIPTS / "reward_func.py", [*labels, "8"], answers=[*answers, "7"])
    assert found == [RewardResult(reward, float(reward == 1.0), {}) for reward in (1.0, 1.0, 0.0, 1.0, 0.1)]


def trained(name: str, folder: Path, kind: Any = AutoModelForCausalLM) -> tuple[Path, list[dict[str, float]]]:
    """Runs a script's small form. Returns: its output folder, from which ``kind`` can be loaded, and its metrics."""
    done = run_script(name, folder, "cpu", first_on_path=Path(sys.executable).parent)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (metrics,) = (folder / "outputs").glob("*/metrics.jsonl")
    out = metrics.parent
    assert (out / "report.html").is_file()
    AutoTokenizer.from_pretrained(out)
    kind.from_pretrained(out)
    return out, read_jsonl(metrics)


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_the_hybrid_engine_trains_tiny_models_on_the_cpu(tmp_path: Path) -> None:
    out, lines = trained(HYBRID, tmp_path)
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["actor/updates"] == line["critic/updates"] == 2 for line in lines)
    assert lines[0]["reward/std"] > 0 and lines[0]["kl/reference"] == pytest.approx(0, abs=1e-6)
    critic = AutoModelForSequenceClassification.from_pretrained(f"{out}_critic")
    assert critic.config.num_labels == 1


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_the_reward_function_trains_and_evaluates_a_tiny_model_on_the_cpu(tmp_path: Path) -> None:
    out, lines = trained(REWARD_FN, tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert "eval/default_pass1" in lines[0] and "eval/default_pass4" in lines[2]
    assert lines[1]["reward/mean"] > 0 and lines[1]["reward/failed"] == 0 and lines[1]["actor/updates"] == 2
    assert (out.parent / f"{out.name}_states" / "best_hf" / "best.json").is_file()


@pytest.mark.timeout(240)
def test_the_reward_model_learns_to_tell_sums_from_letters_on_the_cpu(tmp_path: Path) -> None:
    out, lines = trained(REWARD_MODEL, tmp_path, AutoModelForSequenceClassification)
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert lines[-1]["accuracy/eval"] > 0.95 and lines[-1]["loss/eval"] < lines[9]["loss/eval"]
    config = AutoModelForSequenceClassification.from_pretrained(out).config
    assert config.num_labels == 1 and config.std > 0


@pytest.mark.timeout(240)
def test_dpo_learns_to_prefer_sums_to_letters_on_the_cpu(tmp_path: Path) -> None:
    out, lines = trained(DPO, tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert lines[0]["loss/train"] == pytest.approx(0.6931, abs=1e-3)
    assert lines[-1]["accuracy/eval"] > 0.95 and lines[-1]["reward_gap/eval"] > lines[9]["reward_gap/eval"] > 0
