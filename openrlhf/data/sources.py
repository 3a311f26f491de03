"""From what a user writes behind --data.dataset to rows: local files and folders, hub names, lists and mixtures."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from openrlhf.config.errors import ConfigError
from openrlhf.config.mixing import mixing_weights, split_names
from openrlhf.data.errors import DataError
from openrlhf.data.rows import Rows
from openrlhf.data.tables import READERS, ArrowTable, Table, read_file

# Names that files and folders of a split go by, as the hub has it.
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
# Files that describe a data set and are not rows of it.
NOT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json"}


def load_dataset_mix(
    spec: str, probs: str | None, *, split: str, max_samples: int, seed: int, use_ms: bool = False
) -> Rows:
    """Loads a comma-separated list of data sets and mixes them.

    A data set is a file (.jsonl, .json, .csv, .tsv, .parquet, .arrow, .txt), a folder of such files with or without
    parts for each split, a folder made by ``save_to_disk``, or a hub name; ``path@subfolder``, ``name@split`` and
    ``name@config`` pick a part.

    Without ``probs`` the sets follow each other. With it, each next row comes from a set drawn by its probability
    (weights are scaled to sum to 1), until every set has been used whole at least once; sets that end earlier start
    over. So no row is lost, rows of small sets with large weights repeat, and the same seed gives the same rows.

    Args:
        spec: the list, blanks around commas allowed.
        probs: comma-separated weights, one for each set.
        split: split of sets that name none. A plain file has no splits and is used whole.
        max_samples: rows to keep, counted from the start of the mixture.
        seed: of the mixture.
        use_ms: take names from ModelScope instead of the Hugging Face hub.

    Raises:
        ConfigError: the list or the weights make no sense.
        DataError: a set is missing, empty or cannot be read, or lacks the split.
    """
    names = split_names(spec)
    if not names:
        raise ConfigError("no data set is named: give --data.dataset, --data.prompt_dataset or --eval.dataset a path")
    weights = mixing_weights(probs, len(names), "--data.dataset_probs / --data.prompt_probs")
    if max_samples < 1:
        raise ConfigError(f"--data.max_samples {max_samples} leaves no rows: give at least 1")
    groups = [_load(name, split, use_ms) for name in names]
    for name, tables in zip(names, groups, strict=True):
        if not sum(map(len, tables)):
            raise DataError(f"the data set has no rows in split {split!r}", source=name)
    sizes = [sum(map(len, tables)) for tables in groups]
    order = None if weights is None else _mixed_order(sizes, weights, seed, max_samples)
    rows = Rows([table for tables in groups for table in tables], order)
    return rows if len(rows) <= max_samples else rows.take(max_samples)


def _mixed_order(sizes: list[int], weights: list[float], seed: int, limit: int) -> np.ndarray:
    """Draws sets by weight until each has been used whole once (or ``limit`` rows are drawn).

    Returns: int64 positions in the sets laid end to end.
    """
    rng = np.random.default_rng(seed)
    starts = np.cumsum([0, *sizes[:-1]])
    used = np.zeros(len(sizes), dtype=np.int64)
    parts, drawn = [], 0
    while (used < sizes).any() and drawn < limit:
        draws = rng.choice(len(sizes), size=max(1024, sum(sizes)), p=weights)
        turns = np.zeros(len(draws), dtype=np.int64)
        ends = []
        for index in range(len(sizes)):
            mine = np.flatnonzero(draws == index)
            turns[mine] = used[index] + np.arange(len(mine))
            missing = max(sizes[index] - int(used[index]), 0)
            ends.append(0 if missing == 0 else int(mine[missing - 1]) + 1 if missing <= len(mine) else len(draws))
        count = min(max(ends), limit - drawn)
        draws, turns = draws[:count], turns[:count]
        parts.append(starts[draws] + turns % np.asarray(sizes)[draws])
        used += np.bincount(draws, minlength=len(sizes))
        drawn += count
    return np.concatenate(parts)


def _load(name: str, split: str, use_ms: bool) -> list[Table]:
    path = Path(name).expanduser()
    if path.exists():
        return _load_local(path, split, name)
    base, at, part = name.rpartition("@")
    base_path = Path(base.strip()).expanduser()
    if at and base.strip() and base_path.exists():
        return _load_part(base_path, part.strip(), split, name)
    looks_local = name.startswith(("/", ".", "~")) or path.suffix.lower() in READERS or len(path.parts) > 2
    if looks_local:
        raise DataError("there is no such file or folder", source=name)
    if use_ms:
        return [_load_modelscope(name, split)]
    return [_load_hub(base.strip() if at else name, part.strip() if at else None, split)]


def _load_part(base: Path, part: str, split: str, name: str) -> list[Table]:
    """``path@part``: a folder in ``path``, or one of its splits."""
    if (base / part).exists():
        return _load_local(base / part, split, name)
    if base.is_dir():
        return _load_local(base, part, name)
    raise DataError(f"{base} is a file, so that it has no part {part!r}", source=name)


def _load_local(path: Path, split: str, name: str) -> list[Table]:
    if path.is_file():
        if split != "train":
            warnings.warn(f"{path} is a file without splits: all its rows serve as split {split!r}", stacklevel=2)
        return [read_file(path)]
    if (path / "dataset_dict.json").exists():
        parts = datasets.load_from_disk(str(path))
        if split not in parts:
            raise DataError(f"there is no split {split!r}; it has {', '.join(map(str, parts))}", source=name)
        return [ArrowTable(parts[split], f"{path}/{split}")]
    if (path / "state.json").exists() and (path / "dataset_info.json").exists():
        data = datasets.load_from_disk(str(path))
        own = None if data.split is None else str(data.split)
        if split not in ("train", own):
            raise DataError(f"there is no split {split!r}; it is one data set, {own or 'train'}", source=name)
        return [ArrowTable(data, str(path))]
    return [read_file(file) for file in _files_of_split(path, split, name)]


def _files_of_split(folder: Path, split: str, name: str) -> list[Path]:
    """The data files of ``folder`` and its sub-folders that belong to ``split``, in the order of their names.

    Where no name says which split a file belongs to, all of them are the training split.
    """
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.suffix.lower() in READERS
        and path.name not in NOT_DATA
        and not any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
    ]
    if not files:
        raise DataError(f"the folder has no data files ({', '.join(READERS)})", source=name)
    by_split: dict[str | None, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file.relative_to(folder), split), []).append(file)
    unnamed = by_split.pop(None, [])
    if not by_split:
        by_split, unnamed = {"train": unnamed}, []
    if split not in by_split:
        raise DataError(f"there is no split {split!r}; the folder has {', '.join(by_split)}", source=name)
    if unnamed:
        listed = ", ".join(file.name for file in unnamed[:5])
        warnings.warn(f"{name}: {len(unnamed)} files name no split and are not used: {listed}", stacklevel=2)
    return by_split[split]


def _split_of(relative: Path, wanted: str) -> str | None:
    """The split that a file's name, or else the folders above it, speak of; ``wanted`` counts as such a word."""
    for part in (relative.stem, *reversed(relative.parts[:-1])):
        words = [word for word in re.split(r"[-._\s]+", part.lower()) if word]
        for word in words:
            if word == wanted.lower():
                return wanted
            if word in SPLIT_WORDS:
                return SPLIT_WORDS[word]
    return None


def _load_hub(name: str, part: str | None, split: str) -> Table:
    """``name``, ``name@config``, ``name@split`` or ``name@folder`` of the Hugging Face hub."""
    chosen: dict[str, Any] = {"split": split}
    source = name if part is None else f"{name}@{part}"
    try:
        if part is not None:
            if part in datasets.get_dataset_config_names(name):
                chosen["name"] = part
            elif part in datasets.get_dataset_split_names(name):
                chosen["split"] = part
            else:
                chosen["data_dir"] = part
        data = datasets.load_dataset(name, **chosen)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"there is no file or folder of that name here, and the hub did not give it: {error}", source=source
        ) from error
    return ArrowTable(data, f"{source} ({chosen['split']})")


def _load_modelscope(name: str, split: str) -> Table:
    try:
        from modelscope.msdatasets import MsDataset
    except ImportError as error:
        raise ConfigError("--use_ms needs the package modelscope: pip install modelscope") from error
    return ArrowTable(MsDataset.load(name, split=split).to_hf_dataset(), f"{name} ({split})")
