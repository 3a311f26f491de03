"""The train_rm command as users start it: on conversations, with margins, to a model that scores them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.tracking.jsonl import read_jsonl
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240


def write_talks(path: Path, pairs: int, seed: int) -> Path:
    """Conversations that share all but the last answer."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(pairs):
            shared = [{"role": "user", "content": f"{rng.randint(0, 99)} + {rng.randint(0, 99)}"}]
            answers = (f"{word} {rng.randint(0, 99)}" for word in ("green", "red"))
            better, worse = ([*shared, {"role": "assistant", "content": answer}] for answer in answers)
            file.write(json.dumps({"good": better, "bad": worse, "margin": rng.choice([0, 0.5])}) + "\n")
    return path


def test_the_command_trains_a_model_that_scores_the_better_of_new_conversations_higher(tmp_path: Path) -> None:
    pairs = {
        "model.model_name_or_path": make_tiny_model(tmp_path / "model", "qwen2"),
        "model.loss_type": "logexp",
        "data.dataset": write_talks(tmp_path / "train.jsonl", pairs=64, seed=1),
        "data.chosen_key": "good",
        "data.rejected_key": "bad",
        "eval.dataset": write_talks(tmp_path / "held_out.jsonl", pairs=8, seed=2),
        "eval.steps": 8,
        "train.batch_size": 16,
        "train.micro_batch_size": 8,
        "train.max_epochs": 4,
        "ds.param_dtype": "bf16",
        "adam.lr": 3e-3,
        "ckpt.output_dir": tmp_path / "out",
        "ckpt.path": tmp_path / "states",
    }
    words = ["--data.apply_chat_template", "--model.margin_loss_enable", "--device", "cpu"]
    words += [word for flag, value in pairs.items() for word in (f"--{flag}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "openrlhf.cli.train_rm", *words],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training data: 64 pairs" in done.stdout and "rewards of 8 held-out pairs" in done.stdout
    lines = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 17))
    assert lines[-1]["accuracy/eval"] > 0.9 and lines[-1]["loss/train"] < lines[0]["loss/train"]
    assert "Reward model training" in (tmp_path / "out" / "report.html").read_text()

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    scores = []
    for answer in ("green 7", "red 7"):
        talk = [{"role": "user", "content": "1 + 2"}, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(talk, return_tensors="pt", return_dict=True)["input_ids"][:, :-1]
        with torch.no_grad():
            scores.append(float(model(ids).logits[0, 0]))
    assert scores[0] > scores[1]
    assert model.config.std > 0
