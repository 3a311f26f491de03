"""Whole runs of `train_ppo_ray` in processes of their own: tiny models on the real Ray, vLLM and DeepSpeed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from openrlhf.tracking.jsonl import read_jsonl
from openrlhf.utils.private_folders import SHARED_MEMORY, mapped_shared_memory

START_SECONDS, END_SECONDS = 240, 60


REWARD = """
def reward_func(queries, prompts, labels):
    texts = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    digits = [sum(c.isdigit() for c in text) / max(1, len(text)) for text in texts]
    return {"rewards": digits, "scores": digits, "extra_logs": {"digits": digits[0]}}
"""


def write_prompts(path: Path, count: int = 12) -> Path:
    """Prompts with their sums as labels."""
    rows = [{"question": f"what is {n} + {n} ?", "sum": 2 * n} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(folder: Path, model: Path, prompts: Path, reward: Path, *flags: str) -> list[str]:
    """The command line of a small run; ``flags`` come last and win."""
    return [
        *(sys.executable, "-m", "openrlhf.cli.train_ppo_ray", "--device", "cpu"),
        *("--actor.model_name_or_path", str(model), "--reward.remote_url", str(reward)),
        *("--data.prompt_dataset", str(prompts), "--data.input_key", "question", "--data.label_key", "sum"),
        *("--data.apply_chat_template", "--data.max_len", "96", "--rollout.max_new_tokens", "16"),
        *("--algo.advantage.estimator", "reinforce_baseline", "--actor.adam.lr", "1e-3", "--ds.param_dtype", "fp32"),
        *("--actor.num_gpus_per_node", "1", "--ref.num_gpus_per_node", "1", "--reward.workers", "1"),
        *("--reward.timeout", "30"),
        *("--rollout.batch_size", "4", "--rollout.n_samples_per_prompt", "4", "--rollout.micro_batch_size", "8"),
        *("--train.batch_size", "8", "--train.micro_batch_size", "4", "--train.step_timeout", "120"),
        *("--ckpt.output_dir", str(folder / "out"), "--ckpt.path", str(folder / "states"), *flags),
    ]


@dataclass
class Run:
    """A running or finished command.

    Attributes:
        log: file of stdout and stderr.
    """

    process: subprocess.Popen[bytes]
    log: Path

    def text(self) -> str:
        """Returns: all that was printed so far."""
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, seconds: float = START_SECONDS) -> None:
        """Waits until ``text`` was printed."""
        deadline = time.monotonic() + seconds
        while text not in self.text():
            assert self.process.poll() is None, f"the run ended with {self.process.returncode}:\n{self.text()[-3000:]}"
            assert time.monotonic() < deadline, f"{text!r} did not appear within {seconds} s:\n{self.text()[-3000:]}"
            time.sleep(0.2)

    def family(self) -> list[psutil.Process]:
        """Returns: the driver and all processes below it."""
        driver = psutil.Process(self.process.pid)
        return [driver, *driver.children(recursive=True)]

    def engine_files(self) -> list[Path]:
        """Returns: the folder of each engine, and the shared memory that it claimed."""
        engines = [p for p in self.family() if " ".join(p.cmdline()).startswith("ray::RolloutActor")]
        locks = {file.path for engine in engines for file in engine.open_files() if file.path.endswith("/owner.lock")}
        folders = [Path(lock).parent for lock in locks]
        segments = [json.loads((folder / "shared-memory.json").read_text()) for folder in folders]
        return [*folders, *(SHARED_MEMORY / name for names in segments for name in names)]

    def shared_memory(self) -> list[Path]:
        """Returns: all that the processes of the run have mapped of the shared memory, and that has a name there."""
        family = self.family()
        mapped = {SHARED_MEMORY / name for name in mapped_shared_memory(process.pid for process in family)}
        for process in family:
            # Some live for a moment only.
            with suppress(psutil.Error):
                mapped |= {Path(entry.path) for entry in process.memory_maps(grouped=True)}
        return sorted(path for path in mapped if path.is_relative_to(SHARED_MEMORY) and path.exists())

    def member(self, title: str) -> psutil.Process:
        """Returns: the first process of the family whose command line starts with ``title``."""
        return next(p for p in self.family() if " ".join(p.cmdline()).startswith(title))


@contextmanager
def running(folder: Path, arguments: Sequence[str]) -> Iterator[Run]:
    """Starts a run; whatever of it is left at the end is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"log-{time.monotonic_ns()}.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(arguments, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    run = Run(process, log)
    known: list[psutil.Process] = []
    try:
        yield run
    finally:
        if process.poll() is None:
            known = run.family()
        for member in known:
            if member.is_running():
                member.kill()
        process.wait(30)


def finish(folder: Path, arguments: Sequence[str], seconds: float = 420) -> Run:
    """Runs a command to its end."""
    with running(folder, arguments) as run:
        run.process.wait(seconds)
    return run


def all_gone(family: Sequence[psutil.Process], seconds: float) -> list[str]:
    """Returns: what is still alive of ``family`` after at most ``seconds``."""
    _, alive = psutil.wait_procs(list(family), timeout=seconds)
    # A process that has ended and that nobody has waited for yet is gone as far as anyone can see.
    return [" ".join(p.cmdline()) for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def left_behind(files: Sequence[Path], seconds: float) -> list[Path]:
    """Returns: those of ``files`` that are still there after at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while (left := [path for path in files if path.exists()]) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def metrics(folder: Path, *, timed: bool = False) -> list[dict[str, float]]:
    """The lines of metrics.jsonl, without what depends on the clock unless ``timed``."""
    lines = read_jsonl(folder / "out" / "metrics.jsonl")
    if timed:
        return lines
    return [{k: v for k, v in line.items() if not k.startswith(("time", "throughput"))} for line in lines]


def repeated(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    """What of ``metrics`` two equal runs share to the last bit.

    The engine's own log-probs are not among it: their last bits depend on which requests share a batch, and so on time.
    """
    return [{k: v for k, v in line.items() if not k.startswith("sync/logprob_gap")} for line in lines]


def is_root() -> bool:
    """Returns: whether file systems may be mounted."""
    return os.geteuid() == 0
