"""What a checkpoint folder holds, and how it is written so that a failure leaves the one before intact."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from openrlhf.backends.checkpoints import COMPLETE, OLD, PARTIAL, sweep
from openrlhf.backends.distributed import raise_if_any
from openrlhf.backends.frozen import same_base
from openrlhf.backends.moving_average import MovingAverage
from openrlhf.backends.universal import UNIVERSAL, convert_to_universal, load_universal
from openrlhf.config.errors import ConfigError

TAG = "state"

# A file system with less than this left could not take what was being written.
_FULL_BELOW_BYTES = 1 << 20


def _random_state() -> dict[str, Any]:
    """Tensors and plain values alone, so that reading it back can run no code."""
    version, keys, gauss = random.getstate()
    kind, numpy_keys, position, has_gauss, numpy_gauss = numpy.random.get_state()
    state = {
        "python": [version, torch.tensor(keys), gauss],
        "numpy": [kind, torch.from_numpy(numpy_keys.astype("int64")), position, has_gauss, numpy_gauss],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: dict[str, Any]) -> None:
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys.tolist()), gauss))
    kind, numpy_keys, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy_keys.numpy().astype("uint32"), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


class _RecordingSaver:
    """Stands where DeepSpeed writes files: an error is kept, and the collectives that follow still meet every rank."""

    def __init__(self, inner: Any, folder: Path) -> None:
        self.inner = inner
        self._folder = folder
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def attempt(self, write: Callable[..., None], *args: Any) -> None:
        """Writes, unless something failed before."""
        if self.error is None:
            try:
                write(*args)
            except OSError as error:
                self.error = error
            except RuntimeError as error:
                self.error = _full_disk(self._folder) or error

    def save(self, state_dict: Any, path: str) -> None:
        """Called by DeepSpeed for every file."""
        self.attempt(self.inner.save, state_dict, path)


@contextmanager
def _recorded(engine: Any, folder: Path) -> Iterator[_RecordingSaver]:
    """While it lasts, nothing that DeepSpeed writes can raise."""
    saver, copy_scripts = _RecordingSaver(engine.checkpoint_engine, folder), engine._copy_recovery_script
    engine.checkpoint_engine = saver
    engine._copy_recovery_script = lambda folder: saver.attempt(copy_scripts, folder)
    try:
        yield saver
    finally:
        engine.checkpoint_engine = saver.inner
        del engine._copy_recovery_script


@contextmanager
def _trained_alone(engine: Any) -> Iterator[None]:
    """While it lasts, the weights that DeepSpeed writes are those that are trained. By itself it leaves out frozen ones
    as well, but not a tied weight's second name, nor the constants of weights in 4 bits.
    """
    module = engine.module
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    wanted = trained | {name for name, _ in module.named_buffers()}
    whole = engine.module_state_dict
    engine.module_state_dict = lambda **options: {n: t for n, t in whole(**options).items() if n in wanted}
    try:
        yield
    finally:
        del engine.module_state_dict


def _full_disk(folder: Path) -> OSError | None:
    """torch's writer reports a full disk as a position that it did not expect."""
    if shutil.disk_usage(folder).free < _FULL_BELOW_BYTES:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    return None


def _rng_file(folder: Path, rank: int) -> Path:
    return folder / f"rng_rank{rank}.pt"


def _average_file(folder: Path, rank: int) -> Path:
    return folder / f"ema_rank{rank}.pt"


def save_training_state(
    engine: Any,
    folder: Path,
    state: dict[str, Any],
    average: MovingAverage | None = None,
    *,
    base: float | None = None,
) -> None:
    """Writes beside ``folder`` first and renames when every rank has written all of its files; collective.

    What killed saves left behind beside it goes first.

    Args:
        state: what else the caller needs; anything that pickles.
        average: of the weights, where one is kept.
        base: fingerprint of the weights below adapters, which are left out; None where the whole model is trained.

    Raises:
        RankError: naming the folder, the rank and the reason; whatever stood at ``folder`` is unharmed.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    problem: Exception | None = None
    if dist.get_rank() == 0:
        try:
            sweep(folder.parent)
            shutil.rmtree(partial, ignore_errors=True)
            (partial / TAG).mkdir(parents=True)
        except OSError as error:
            problem = error
    raise_if_any(f"writing the checkpoint {folder}", problem)
    adapted = nullcontext() if base is None else _trained_alone(engine)
    with _recorded(engine, partial) as saver, adapted:
        engine.save_checkpoint(
            str(partial),
            tag=TAG,
            client_state={"ours": state},
            save_latest=False,
            exclude_frozen_parameters=base is not None,
        )
        saver.save(_random_state(), str(_rng_file(partial, dist.get_rank())))
        if average is not None:
            saver.save(average.state(), str(_average_file(partial, dist.get_rank())))
    _finish(_layout(engine, base), partial, folder, saver.error)


def _layout(engine: Any, base: float | None) -> dict[str, Any]:
    """What has to be the same for a state to be read back."""
    return {
        "ranks": dist.get_world_size(),
        "ZeRO stage": engine.zero_optimization_stage(),
        "dtype": str(engine.get_data_types()[0]).removeprefix("torch."),
        "base": base,
        "optimizer": type(engine.basic_optimizer).__name__,
    }


def _refuse_other_layout(folder: Path, written: dict[str, Any], running: dict[str, Any], any_ranks: bool) -> None:
    """Raises: ConfigError, naming both layouts and what to do."""
    if written["ranks"] != running["ranks"] and not any_ranks:
        raise ConfigError(
            f"the checkpoint {folder} was written by {_ranks(written['ranks'])} and this run has "
            f"{_ranks(running['ranks'])}: ZeRO's state is split over the ranks, so resume on {written['ranks']}, or "
            "start anew from an exported model, or let the state be converted (--ds.use_universal_ckpt)"
        )
    for name in ("ZeRO stage", "dtype"):
        if written[name] != running[name]:
            raise ConfigError(
                f"the checkpoint {folder} was written with {name} {written[name]} and this run has {running[name]}: "
                "resume with the --ds flags of the run that wrote it, or start anew from an exported model"
            )
    there, here = written.get("base"), running["base"]
    if (there is None) != (here is None):
        found, wanted = ("the whole model", "adapters") if there is None else ("adapters", "the whole model")
        raise ConfigError(
            f"the checkpoint {folder} holds {found} and this run trains {wanted}: resume with the --ds.lora.rank of "
            "the run that wrote it, or start anew"
        )
    if there is not None and not same_base(there, here):
        raise ConfigError(
            f"the checkpoint {folder} holds adapters of another model: the weights below them are not those of this "
            "run; resume with the model of the run that wrote it"
        )


def _ranks(number: int) -> str:
    return f"{number} rank" if number == 1 else f"{number} ranks"


def _finish(layout: dict[str, Any], partial: Path, folder: Path, problem: Exception | None) -> None:
    what = f"writing the checkpoint {folder}"
    try:
        raise_if_any(what, problem)
        if dist.get_rank() == 0:
            try:
                (partial / COMPLETE).write_text(json.dumps(layout) + "\n")
                old = folder.with_name(folder.name + OLD)
                if folder.exists():
                    os.replace(folder, old)
                os.replace(partial, folder)
                shutil.rmtree(old, ignore_errors=True)
            except OSError as error:
                problem = error
        raise_if_any(what, problem)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)


def _restore_average(average: MovingAverage, folder: Path, ranks: int) -> None:
    """Raises: ConfigError where the run that wrote the checkpoint kept none."""
    files = [_average_file(folder, rank) for rank in range(ranks)]
    if not all(file.is_file() for file in files):
        raise ConfigError(
            f"the checkpoint {folder} holds no moving average of the weights: resume without --train.enable_ema, or "
            "start anew from an exported model"
        )
    average.restore([torch.load(file, weights_only=True, mmap=True) for file in files], f"the checkpoint {folder}")


def load_training_state(
    engine: Any,
    folder: Path,
    average: MovingAverage | None = None,
    *,
    any_ranks: bool = False,
    base: float | None = None,
) -> dict[str, Any]:
    """Puts weights, their average, optimizer, scheduler and this rank's random state back; collective.

    DeepSpeed unpickles its part of the folder: only one's own checkpoints may be loaded.

    Args:
        average: of the weights, where one is to go on.
        any_ranks: another number of ranks may have written it. Its state is converted once, inside the folder. Where
            the number differs, every rank goes on with the random state and the ``state`` of the writers' rank 0.
        base: as in ``save_training_state``.

    Returns: the ``state`` that was saved.

    Raises:
        ConfigError: another number of ranks, another stage, another dtype or another model below its adapters has
            written it, or it holds no moving average where one is to go on.
        RankError: the folder is missing or incomplete, or its state cannot be converted.
    """
    problem: Exception | None = None
    writers = 0
    try:
        if not (folder / COMPLETE).exists():
            raise FileNotFoundError(f"{folder} is not a complete checkpoint")
        layout = json.loads((folder / COMPLETE).read_text())
        writers = layout["ranks"]
        _refuse_other_layout(folder, layout, _layout(engine, base), any_ranks)
        if average is not None:
            _restore_average(average, folder, writers)
    except (ConfigError, OSError, ValueError) as error:
        problem = error
    raise_if_any(f"loading the checkpoint {folder}", problem)
    if engine.load_universal_checkpoint():
        _convert_on_rank_0(folder)
        client_state = load_universal(engine, folder, whole=base is None)
    else:
        _, client_state = engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=base is None)
    source = dist.get_rank() if writers == dist.get_world_size() else 0
    _restore_random_state(torch.load(_rng_file(folder, source), weights_only=True))
    return client_state["ours"]


def _convert_on_rank_0(folder: Path) -> None:
    """Raises: RankError, on all ranks."""
    problem: Exception | None = None
    if dist.get_rank() == 0:
        try:
            convert_to_universal(folder / TAG, folder / UNIVERSAL)
        except (OSError, RuntimeError) as error:
            problem = error
    raise_if_any(f"converting the checkpoint {folder} for another number of ranks", problem)
