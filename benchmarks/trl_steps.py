"""GRPO with TRL, one process: the other side of compare_trl.py, which calls it with the Python that has TRL.

Needs trl and datasets, nothing of this project. Writes one JSON object a step: seconds and tokens of the responses.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from trl import GRPOConfig, GRPOTrainer


def reward(completions: list[Any], **_: Any) -> list[float]:
    """The share of lower-case letters, as reward.py of the other side has it."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(c.islower() for c in text) / max(1, len(text)) for text in texts]


class StepClock(transformers.TrainerCallback):
    """Writes how long each step took, from the end of the one before it: generation, rewards and update."""

    def __init__(self, path: Path, samples: int) -> None:
        self._file = path.open("w")
        self._samples = samples
        self._last = 0.0
        self._seconds = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._last = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        self._seconds, self._last = now - self._last, now

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "completions/mean_length" in logs:
            tokens = logs["completions/mean_length"] * self._samples
            self._file.write(json.dumps({"seconds": self._seconds, "tokens": tokens}) + "\n")
            self._file.flush()


def main() -> None:
    """Command line: a JSON file with the settings, see ``Case`` of compare_trl.py."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    case = json.loads(Path(sys.argv[1]).read_text())
    samples = case["prompts"] * case["samples"]
    config = GRPOConfig(
        output_dir=case["output_dir"],
        max_steps=case["steps"],
        per_device_train_batch_size=case["micro_batch"],
        gradient_accumulation_steps=samples // case["micro_batch"],
        num_generations=case["samples"],
        max_completion_length=case["new_tokens"],
        learning_rate=case["lr"],
        lr_scheduler_type="constant",
        loss_type="grpo",
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        # Weights in the named type without autocast, the cheapest that TRL has.
        bf16=False,
        model_init_kwargs={"dtype": case["dtype"]},
        gradient_checkpointing=False,
        use_cpu=True,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=case["model"],
        reward_funcs=reward,
        args=config,
        train_dataset=datasets.load_dataset("json", data_files=case["data"], split="train"),
        callbacks=[StepClock(Path(case["times"]), samples)],
    )
    print(f"trl with {torch.get_num_threads()} threads, {next(trainer.model.parameters()).dtype}", flush=True)
    trainer.train()


if __name__ == "__main__":
    main()
