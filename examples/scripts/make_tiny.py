"""Makes what the scripts beside it run on without a GPU: a policy and a reward model of a million parameters, and sums,
alone and with a right and a wrong answer.

Usage: make_tiny.py FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from openrlhf.trainer.process import prepare_process
from openrlhf.trainer.quickstart_task import Problem, make_model, make_problems, write_problems


def make(folder: Path) -> None:
    """Writes ``policy``, ``reward_model``, and ``prompts.jsonl`` and ``pairs.jsonl`` with what is held out of each; the
    weights are random.
    """
    folder.mkdir(parents=True, exist_ok=True)
    problems = make_problems(train=2400, seed=0)
    write_problems(folder / "prompts.jsonl", problems.train)
    write_problems(folder / "held_out.jsonl", problems.held_out)
    write_pairs(folder / "pairs.jsonl", problems.train)
    write_pairs(folder / "held_out_pairs.jsonl", problems.held_out)
    make_model(folder / "policy", seed=0)
    make_model(folder / "reward_model", seed=1)
    # The head is new, and without a seed each call would make another judge.
    torch.manual_seed(1)
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "reward_model", num_labels=1)
    judge.save_pretrained(folder / "reward_model")


def write_pairs(path: Path, problems: Sequence[Problem]) -> None:
    """Writes one JSON object a line with ``question``, ``chosen`` (the sum) and ``rejected`` (letters)."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for problem in problems:
            wrong = "".join(rng.choices("abcdef", k=2))
            row = {"question": problem.question, "chosen": problem.answer, "rejected": wrong}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    prepare_process("cpu", bars=False)
    # It would warn in a table that the reward model's head is new.
    transformers.utils.logging.set_verbosity_error()
    make(Path(sys.argv[1]))
