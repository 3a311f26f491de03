"""Which checkpoints are kept, and which one a run resumes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf.backends.checkpoints import CheckpointStore


def _write(store: CheckpointStore, step: int, *, megabytes: float = 0.0, complete: bool = True) -> None:
    folder = store.folder(step)
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"\0" * int(megabytes * 1e6))
    if complete:
        (folder / "complete").touch()


def _steps(store: CheckpointStore) -> list[str]:
    return [path.name for path in store.complete()]


def test_the_newest_by_step_is_resumed_and_not_by_name_or_by_pointer(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, max_num=9, max_mem_gb=1)
    assert store.latest() is None
    for step in (9, 10, 100):
        _write(store, step)
    store.prune()
    assert (tmp_path / "latest").read_text().strip() == "global_step100"
    _write(store, 101)
    _write(store, 102, complete=False)
    (tmp_path / "global_step103.partial").mkdir()
    assert store.latest() == store.folder(101)


@pytest.mark.parametrize(
    ("max_num", "max_mb", "kept"), [(2, 1000, [4, 5]), (9, 2.5, [4, 5]), (9, 0.5, [5]), (0, 1000, [5]), (9, 1000, None)]
)
def test_the_oldest_go_first_and_the_newest_always_stays(
    tmp_path: Path, max_num: int, max_mb: float, kept: list[int] | None
) -> None:
    store = CheckpointStore(tmp_path, max_num=max_num, max_mem_gb=max_mb / 1000)
    for step in range(1, 6):
        _write(store, step, megabytes=1)
    store.prune()
    assert _steps(store) == [f"global_step{step}" for step in kept or range(1, 6)]


def test_an_empty_or_missing_folder_is_no_error(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "nothing", max_num=1, max_mem_gb=1)
    store.prune()
    assert store.latest() is None
