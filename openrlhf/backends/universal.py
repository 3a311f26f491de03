"""Checkpoints of ZeRO for another number of ranks, in DeepSpeed's universal format."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

# Where the converted state stands inside a checkpoint, and how the folder begins in which it is written first.
UNIVERSAL, PARTIAL_UNIVERSAL = "universal", ".universal-"
# Inside of it, the sizes of all its files by their names: DeepSpeed leaves a weight as it is whose file is missing.
_FILES = "files.json"

# Less than the other ranks wait in the collective that follows.
CONVERSION_S = 1500.0


def is_whole(target: Path) -> bool:
    """Returns: whether a converted state is as it was written: nothing is missing or cut off."""
    try:
        written = json.loads((target / _FILES).read_text())
        return written == _sizes(target) and bool(written)
    except (OSError, ValueError):
        return False


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != _FILES)
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def convert_to_universal(state: Path, target: Path) -> None:
    """Writes ZeRO's state of any number of ranks as one file for each weight; a whole ``target`` stays as it is.

    DeepSpeed's converter runs in a process of its own: it prints, starts workers, and knows nothing of our ranks.

    Args:
        state: what ``engine.save_checkpoint`` wrote under one tag, on ZeRO 1, 2 or 3.
        target: must be on the same file system; it takes some three times the room of the weights in float32.

    Raises:
        OSError: nothing can be written there.
        RuntimeError: the converter failed or took too long, and ``target`` is what it was; or ``target`` is not whole
            and there is nothing to convert again.
    """
    end = time.monotonic() + CONVERSION_S
    with _sole_converter(target, end):
        if is_whole(target):
            return
        if target.exists() and not state.is_dir():
            raise RuntimeError(f"{target} is not whole, and {state} is not there to be converted again")
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
    # What a killed conversion left; its workers may still be writing there, so each has a folder of its own.
    for left in target.parent.glob(f"{PARTIAL_UNIVERSAL}*"):
        _remove(left)
    partial = Path(tempfile.mkdtemp(prefix=PARTIAL_UNIVERSAL, dir=target.parent))
    workers = str(min(os.cpu_count() or 1, 4))
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(state), "--output_folder", str(partial / UNIVERSAL)]
    command += ["--num_extract_workers", workers, "--num_merge_workers", workers]
    try:
        _run(command, seconds)
        (partial / UNIVERSAL / _FILES).write_text(json.dumps(_sizes(partial / UNIVERSAL)))
        _remove(target)
        os.replace(partial / UNIVERSAL, target)
    finally:
        _remove(partial)


def _run(command: list[str], seconds: float) -> None:
    """Runs the converter, and ends it with its workers whatever ends this. Raises: RuntimeError where it fails."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, said = process.communicate(timeout=seconds)
        if process.returncode != 0:
            lines = said.strip().splitlines() or ["no word"]
            raise RuntimeError(f"DeepSpeed's converter ended with status {process.returncode}: {lines[-1]}")
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"DeepSpeed's converter took longer than {CONVERSION_S:.0f} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _remove(path: Path) -> None:
    """Removes a folder, or whatever else has its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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
