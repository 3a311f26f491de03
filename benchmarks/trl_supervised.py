"""SFT and DPO with TRL, one process: the other side of compare_trl_supervised.py, which calls it with the Python that
has TRL.

Needs trl and datasets, nothing of this project. Writes one JSON object a step: loss, gradient norm, learning rate,
seconds since the end of the step before, and tokens without padding.
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
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

TRAINERS = {"sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig)}


class Recorder(transformers.TrainerCallback):
    """Writes a line for each step. The Trainer logs rounded numbers or none of the parts, so losses come from it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self._loss, self._lr, self._tokens, self._seconds, self._last = 0.0, 0.0, 0.0, 0.0, 0.0

    def add_loss(self, loss: torch.Tensor) -> None:
        """Takes a micro-batch's share of the step's loss."""
        self._loss += float(loss)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._last = time.perf_counter()

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
        self._lr = float(optimizer.param_groups[0]["lr"])

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        self._seconds, self._last = now - self._last, now

    def on_log(self, _: Any, state: Any, *__: Any, logs: dict[str, float], **___: Any) -> None:
        if "grad_norm" not in logs:
            return
        line = {"step": state.global_step, "loss": self._loss, "grad_norm": logs["grad_norm"], "lr": self._lr}
        line |= {"seconds": self._seconds, "tokens": logs["num_tokens"] - self._tokens}
        self._loss, self._tokens = 0.0, logs["num_tokens"]
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def run(job: dict[str, Any]) -> None:
    """Trains.

    Args:
        job: ``task`` ("sft" or "dpo"), ``model``, ``data`` (JSON lines, used in their order), ``dtype`` of the weights,
            ``metrics`` (file to write), ``config`` (fields of SFTConfig or DPOConfig; the model goes there).
    """
    base, config_class = TRAINERS[job["task"]]
    recorder = Recorder(Path(job["metrics"]))

    class Recorded(base):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            recorder.add_loss(loss)
            return loss

    trainer = Recorded(
        model=job["model"],
        args=config_class(
            **job["config"],
            model_init_kwargs={"dtype": job["dtype"]},
            use_cpu=True,
            gradient_checkpointing=False,
            train_sampling_strategy="sequential",
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=datasets.load_dataset("json", data_files=job["data"], split="train"),
        callbacks=[recorder],
    )
    dtype = next(trainer.model.parameters()).dtype
    print(f"{job['metrics']}: {torch.get_num_threads()} threads, weights in {dtype}", flush=True)
    trainer.train()
    trainer.save_model()


def main() -> None:
    """Command line: a JSON file with a list of jobs, see ``run``."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        run(job)


if __name__ == "__main__":
    main()
