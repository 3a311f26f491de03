"""Makes what the scripts beside it run on without a GPU: a policy and a reward model of a million parameters, and sums.

Usage: make_tiny.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

from openrlhf.trainer.process import prepare_process
from openrlhf.trainer.quickstart_task import make_model, make_problems, write_problems


def make(folder: Path) -> None:
    """Writes ``policy``, ``reward_model``, ``prompts.jsonl`` and ``held_out.jsonl``; the weights are random."""
    folder.mkdir(parents=True, exist_ok=True)
    problems = make_problems(train=2400, seed=0)
    write_problems(folder / "prompts.jsonl", problems.train)
    write_problems(folder / "held_out.jsonl", problems.held_out)
    make_model(folder / "policy", seed=0)
    make_model(folder / "reward_model", seed=1)
    # The head is new, and without a seed each call would make another judge.
    torch.manual_seed(1)
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "reward_model", num_labels=1)
    judge.save_pretrained(folder / "reward_model")


if __name__ == "__main__":
    prepare_process("cpu", bars=False)
    # It would warn in a table that the reward model's head is new.
    transformers.utils.logging.set_verbosity_error()
    make(Path(sys.argv[1]))
