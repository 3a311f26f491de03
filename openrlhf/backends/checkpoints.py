"""Which checkpoints there are, which is the newest, and which have to go. Needs neither torch nor the other ranks."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from openrlhf.config.errors import ConfigError

# Written last into a checkpoint: a folder without it is what an interrupted run left behind.
COMPLETE = "complete"
LATEST = "latest"
# What a checkpoint is called while it is written, and while one of the same step takes its place.
PARTIAL, OLD = ".partial", ".old"
# Written last into an exported model or adapter, and where the export stands until then, inside its folder.
MODEL_CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
EXPORT_CONFIGS = (MODEL_CONFIG, ADAPTER_CONFIG)
PARTIAL_EXPORT = ".partial"

# Of the checkpoints that a message names, no more than these.
_NAMED = 3

_STATE = re.compile(r"global_step(\d+)")
_EXPORT = re.compile(r"global_step(\d+)_hf")


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _entries(root: Path, pattern: re.Pattern[str], suffix: str = "") -> dict[int, Path]:
    """What stands in ``root`` under a name of ``pattern`` and ``suffix``, by step."""
    if not root.is_dir():
        return {}
    names = ((path, pattern.fullmatch(path.name.removesuffix(suffix))) for path in root.iterdir())
    return {int(name[1]): path for path, name in names if name and path.name.endswith(suffix)}


def _states(root: Path) -> dict[int, Path]:
    """The complete states by step. A kill between the two renames of a save leaves the older one as ``.old``."""
    both = (_entries(root, _STATE, OLD), _entries(root, _STATE))
    return {step: path for found in both for step, path in found.items() if (path / COMPLETE).is_file()}


def _exports(root: Path) -> dict[int, Path]:
    return {step: path for step, path in _entries(root, _EXPORT).items() if _is_export(path)}


def _is_export(folder: Path) -> bool:
    return any((folder / name).is_file() for name in EXPORT_CONFIGS)


def sweep(root: Path) -> None:
    """Removes from ``root`` what killed saves left half done, and gives a checkpoint its name back.

    Called before the next save, by the process that renames. Raises: OSError.
    """
    complete = _states(root)
    for path in _entries(root, _STATE, PARTIAL).values():
        shutil.rmtree(path)
    for step, path in _entries(root, _STATE, OLD).items():
        if complete.get(step) == path:
            final = root / path.name.removesuffix(OLD)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(path, final)
        else:
            shutil.rmtree(path)
    for path in _entries(root, _EXPORT).values():
        if (path / PARTIAL_EXPORT).is_dir():
            shutil.rmtree(path / PARTIAL_EXPORT)
            if not _is_export(path):
                shutil.rmtree(path)


class CheckpointStore:
    """The checkpoints of one model: states to go on from, in ``global_step<N>``, and exported models, in
    ``global_step<N>_hf``. State and export of one step count as one checkpoint.

    Args:
        root: the folder of the states; it need not exist yet.
        max_num: checkpoints that are kept.
        max_mem_gb: room in GB that all of them together may take.
        exports: the folder of the exported models, where it is another one.
    """

    def __init__(self, root: Path, *, max_num: int, max_mem_gb: float, exports: Path | None = None) -> None:
        self.root = Path(root)
        self._exports = self.root if exports is None else Path(exports)
        self._max_num = max_num
        self._max_bytes = max_mem_gb * 1e9
        self._after: int | None = None

    def folder(self, step: int) -> Path:
        """Returns: where the state after ``step`` optimizer or rollout steps belongs."""
        return self.root / f"global_step{step}"

    def export_folder(self, step: int) -> Path:
        """Returns: where the exported model of that step belongs."""
        return self._exports / f"global_step{step}_hf"

    def complete(self) -> list[Path]:
        """Returns: the complete states, oldest first."""
        return [path for _, path in sorted(_states(self.root).items())]

    def latest(self) -> Path | None:
        """Returns: the newest complete state. Folders decide, not the pointer, which a crash may leave behind."""
        complete = self.complete()
        return complete[-1] if complete else None

    def held(self) -> list[Path]:
        """Returns: the complete states and exported models, by step."""
        return [path for _, path in sorted([*_states(self.root).items(), *_exports(self._exports).items()])]

    def go_on_after(self, step: int) -> None:
        """Tells that the run goes on from ``step``: what is left of later steps goes before its next save.

        Without it, those would count as the newest ones, and what the run saves would be removed for them.
        """
        self._after = step

    def sweep(self) -> None:
        """Removes what killed saves left behind, and checkpoints that the run did not go on from.

        Saving a state does the former too, in the folder of the states.
        """
        for root in {self.root, self._exports}:
            sweep(root)
        if self._after is not None:
            found = [*_states(self.root).items(), *_exports(self._exports).items()]
            for path in [path for step, path in found if step > self._after]:
                shutil.rmtree(path)
            self._after = None

    def prune(self, *, beside: Sequence[CheckpointStore] = (), keep: int | None = None) -> None:
        """Points ``latest`` to the newest state and removes the oldest checkpoints beyond the limits.

        The newest one always stays, and so do the newest that a run can go on from and ``keep``. Called after a
        checkpoint has been written, so that a failure to write never costs an older one.

        Args:
            beside: stores of models that a run goes on with only together with this one. What they hold of a step is
                part of its checkpoint: it counts for the limits of this store, stays and goes with it.
            keep: a step whose checkpoint stays, where there is one; it counts as the others do.
        """
        stores = (self, *beside)
        for store in stores:
            store._point_to_latest()
        states = [_states(store.root) for store in stores]
        resumable = set.intersection(*(set(found) for found in states))
        folders: dict[int, list[Path]] = {}
        for found in (*states, *(_exports(store._exports) for store in stores)):
            for step, path in found.items():
                folders.setdefault(step, []).append(path)
        sizes = {step: sum(_bytes(path) for path in paths) for step, paths in folders.items()}
        stay = {max(found) for found in (resumable, folders) if found} | {keep}
        for step in sorted(folders.keys() - stay):
            if len(sizes) <= self._max_num and sum(sizes.values()) <= self._max_bytes:
                break
            for path in folders[step]:
                shutil.rmtree(path)
            del sizes[step]

    def _point_to_latest(self) -> None:
        latest = self.latest()
        if latest is not None:
            pointer = self.root / (LATEST + PARTIAL)
            pointer.write_text(latest.name + "\n")
            os.replace(pointer, self.root / LATEST)


def refuse_other_run(path: str, stores: Iterable[CheckpointStore], *, resumable: bool) -> None:
    """To be asked by a run that saves and starts at its first step: its checkpoints have lower steps than what an
    earlier run left, so they would be the ones that ``prune`` removes, and the other's the ones to go on from.

    Args:
        path: --ckpt.path.
        stores: all that have their folders below it.
        resumable: --ckpt.load_enable would find a state to go on from.

    Raises: ConfigError where one of the stores holds a checkpoint.
    """
    names = sorted({path.name: None for store in stores for path in store.held()}, key=_number)
    if not names:
        return
    some = ", ".join(names[-_NAMED:]) + (" and older ones" if len(names) > _NAMED else "")
    if resumable:
        raise ConfigError(
            f"--ckpt.path {path} holds states of another run ({some}): add --ckpt.load_enable to go on from them, or "
            "name another folder."
        )
    raise ConfigError(
        f"--ckpt.path {path} holds checkpoints of another run ({some}) that this run cannot go on from: name another "
        "folder, or remove them."
    )


def _number(name: str) -> int:
    return int(re.findall(r"\d+", name)[0])
