"""The train_dpo command as users start it: on conversations, with what the reference says computed before training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.tracking.jsonl import read_jsonl
from openrlhf.trainer.reference import FILE
from tests.integration.test_rm_cli import ROOT, TIMEOUT_S, write_talks
from tests.tiny_models import make_tiny_model


def answer_logprob(model: AutoModelForCausalLM, tokenizer: AutoTokenizer, answer: str) -> float:
    talk = [{"role": "user", "content": "1 + 2"}, {"role": "assistant", "content": answer}]
    whole = tokenizer.apply_chat_template(talk, return_tensors="pt", return_dict=True)["input_ids"]
    start = tokenizer.apply_chat_template(talk[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    with torch.no_grad():
        logprobs = model(whole).logits[0].log_softmax(-1)[:-1].gather(-1, whole[0, 1:, None])[:, 0]
    return float(logprobs[len(start) - 1 :].sum())


def test_the_command_moves_a_model_towards_the_better_conversations_and_keeps_what_the_reference_said(
    tmp_path: Path,
) -> None:
    pairs = {
        "model.model_name_or_path": make_tiny_model(tmp_path / "model", "qwen2"),
        "data.dataset": write_talks(tmp_path / "train.jsonl", pairs=64, seed=1),
        "data.chosen_key": "good",
        "data.rejected_key": "bad",
        "eval.dataset": write_talks(tmp_path / "held_out.jsonl", pairs=8, seed=2),
        "eval.split": "train",
        "eval.steps": 8,
        "train.batch_size": 16,
        "train.micro_batch_size": 8,
        "train.max_epochs": 2,
        "ds.param_dtype": "bf16",
        "adam.lr": 1e-3,
        "ckpt.output_dir": tmp_path / "out",
        "ckpt.path": tmp_path / "states",
        "ckpt.save_steps": 4,
    }
    words = ["--data.apply_chat_template", "--ref.precompute", "--device", "cpu"]
    words += [word for flag, value in pairs.items() for word in (f"--{flag}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "openrlhf.cli.train_dpo", *words],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training data: 64 pairs" in done.stdout and "Warning" not in done.stderr
    assert "reference log-probs of the training data: to be computed for 64 pairs" in done.stdout
    assert (tmp_path / "states" / FILE).is_file() and (tmp_path / "states" / "global_step8").is_dir()
    lines = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[0]["loss/train"] == pytest.approx(0.693, abs=2e-3)
    assert lines[-1]["accuracy/eval"] == 1 and lines[-1]["loss/train"] < lines[0]["loss/train"]
    assert "Direct preference optimisation" in (tmp_path / "out" / "report.html").read_text()

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    gaps = []
    for folder in ("model", "out"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32)
        gaps.append(answer_logprob(model, tokenizer, "green 7") - answer_logprob(model, tokenizer, "red 7"))
    assert gaps[1] > gaps[0] + 1
