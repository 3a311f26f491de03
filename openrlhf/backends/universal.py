"""Checkpoints of ZeRO for another number of ranks, in DeepSpeed's universal format."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# Where the converted state stands inside a checkpoint, and where it is written first.
UNIVERSAL, PARTIAL_UNIVERSAL = "universal", ".universal"

# Less than the other ranks wait in the collective that follows.
CONVERSION_S = 1500.0


def convert_to_universal(state: Path, target: Path) -> None:
    """Writes ZeRO's state of any number of ranks as one file for each weight; an existing ``target`` stays as it is.

    DeepSpeed's converter runs in a process of its own: it prints, starts workers, and knows nothing of our ranks.

    Args:
        state: what ``engine.save_checkpoint`` wrote under one tag, on ZeRO 1, 2 or 3.
        target: must be on the same file system; it takes some three times the room of the weights in float32.

    Raises:
        OSError: nothing can be written there.
        RuntimeError: the converter failed or took too long; ``target`` does not exist then.
    """
    end = time.monotonic() + CONVERSION_S
    with _sole_converter(target, end):
        if not target.is_dir():
            _convert(state, target, end - time.monotonic())


@contextmanager
def _sole_converter(target: Path, end: float) -> Iterator[None]:
    """One conversion at a time: a run that resumes may meet the one that was started ahead, and waits for its end."""
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        while not _locked(folder):
            if time.monotonic() > end:
                raise RuntimeError(f"another conversion of {target.parent} has not ended within {CONVERSION_S:.0f} s")
            time.sleep(1)
        yield
    finally:
        os.close(folder)


def _locked(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _convert(state: Path, target: Path, seconds: float) -> None:
    partial = target.with_name(PARTIAL_UNIVERSAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    workers = str(min(os.cpu_count() or 1, 4))
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(state), "--output_folder", str(partial / UNIVERSAL)]
    command += ["--num_extract_workers", workers, "--num_merge_workers", workers]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["no word"]
            raise RuntimeError(f"DeepSpeed's converter ended with status {done.returncode}: {lines[-1]}")
        os.replace(partial / UNIVERSAL, target)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"DeepSpeed's converter took longer than {CONVERSION_S:.0f} s") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load_universal(engine: Any, folder: Path, *, whole: bool = True) -> dict[str, Any]:
    """Loads ``folder / UNIVERSAL`` into an engine whose config says ``load_universal``; collective.

    Args: ``whole``: every weight of the model is in the state; False where it holds adapters alone.

    Returns: DeepSpeed's client state, rank 0's of the run that wrote it.
    """
    optimizer = engine.optimizer.optimizer
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    _, client_state = engine.load_checkpoint(str(folder), tag=UNIVERSAL, load_module_strict=whole)
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        # On stage 3, DeepSpeed gives every group the first one's: norms and biases would decay.
        group["weight_decay"] = decay
    place_steps(optimizer)
    return client_state


def place_steps(optimizer: torch.optim.Optimizer) -> None:
    """Gives every weight a step counter of its own where the optimizer looks for it.

    DeepSpeed leaves them as they come from a file: on the CPU, and on stage 3 one for all weights, which would count
    each of them. A fused step wants them beside the weights.
    """
    # On stage 3 the weights that have a state are in no group by now.
    fused = all(group.get("fused") for group in optimizer.param_groups)
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(parameter.device if fused else "cpu", copy=True)
