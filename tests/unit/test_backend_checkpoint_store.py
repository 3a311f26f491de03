"""Which checkpoints are kept, and which one a run resumes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf.backends.checkpoints import CheckpointStore, refuse_other_run
from openrlhf.config import ConfigError


def _write(store: CheckpointStore, step: int, *, megabytes: float = 0.0, complete: bool = True) -> None:
    folder = store.folder(step)
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"\0" * int(megabytes * 1e6))
    if complete:
        (folder / "complete").touch()


def _export(store: CheckpointStore, step: int, *, megabytes: float = 0.0, complete: bool = True) -> None:
    folder = store.export_folder(step)
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"\0" * int(megabytes * 1e6))
    if complete:
        (folder / "config.json").touch()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


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


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("max_num", "max_mb"), [(2, 1000), (9, 4.5)])
def test_an_exported_model_counts_and_goes_with_the_state_of_its_step(
    tmp_path: Path, max_num: int, max_mb: float, apart: bool
) -> None:
    states = tmp_path / "_actor" if apart else tmp_path
    store = CheckpointStore(states, max_num=max_num, max_mem_gb=max_mb / 1000, exports=tmp_path if apart else None)
    for step in (1, 2, 3):
        _write(store, step, megabytes=1)
        _export(store, step, megabytes=1)
    _export(store, 0, complete=False)
    store.prune()
    assert _steps(store) == ["global_step2", "global_step3"]
    assert [name for name in _names(tmp_path) if name.endswith("_hf")] == [
        "global_step0_hf",  # nothing that a save has finished
        "global_step2_hf",
        "global_step3_hf",
    ]


def test_exports_alone_are_pruned_too_and_the_last_state_to_go_on_from_is_not(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, max_num=2, max_mem_gb=1)
    _write(store, 1)
    _write(store, 2)
    for step in (3, 4, 5):
        _export(store, step)
    store.prune()
    assert _names(tmp_path) == ["global_step2", "global_step5_hf"]


@pytest.mark.parametrize(
    ("max_num", "max_mb", "kept"),
    [(3, 1000, [2, 4, 5]), (2, 1000, [2, 5]), (1, 1000, [2, 5]), (9, 3.5, [2, 4, 5]), (9, 0.5, [2, 5])],
)
def test_the_checkpoint_that_is_to_be_kept_stays_beside_the_newest_and_counts(
    tmp_path: Path, max_num: int, max_mb: float, kept: list[int]
) -> None:
    store = CheckpointStore(tmp_path, max_num=max_num, max_mem_gb=max_mb / 1000)
    for step in range(1, 6):
        _write(store, step, megabytes=1)
    store.prune(keep=2)
    assert _steps(store) == [f"global_step{step}" for step in kept]
    store.prune(keep=77)
    assert store.latest() == store.folder(5)


@pytest.mark.parametrize(("max_mb", "kept"), [(9.5, [3, 4, 5]), (8.5, [4, 5]), (0, [5])])
def test_two_stores_that_belong_together_have_one_budget_and_keep_the_same_steps(
    tmp_path: Path, max_mb: float, kept: list[int]
) -> None:
    limits = {"max_num": 9, "max_mem_gb": max_mb / 1000}
    actor = CheckpointStore(tmp_path / "_actor", **limits, exports=tmp_path)
    critic = CheckpointStore(tmp_path / "_critic", **limits)
    for step in range(1, 6):
        _write(actor, step, megabytes=1)
        _write(critic, step, megabytes=2)
    actor.prune(beside=[critic])
    assert _steps(actor) == _steps(critic) == [f"global_step{step}" for step in kept]
    for store in (actor, critic):
        assert (store.root / "latest").read_text() == "global_step5\n"


def test_the_newest_step_that_both_stores_have_stays_where_one_of_them_has_a_newer_one(tmp_path: Path) -> None:
    limits = {"max_num": 1, "max_mem_gb": 1}
    actor = CheckpointStore(tmp_path / "_actor", **limits)
    critic = CheckpointStore(tmp_path / "_critic", **limits)
    for step in (1, 2, 3):
        _write(actor, step)
        _write(critic, step, complete=step != 3)
    actor.prune(beside=[critic])
    assert _steps(actor) == ["global_step2", "global_step3"] and _steps(critic) == ["global_step2"]


def test_a_kill_between_the_two_renames_of_a_save_leaves_the_older_state_to_resume_from(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, max_num=9, max_mem_gb=1)
    _write(store, 1)
    _write(store, 2)
    store.folder(2).rename(tmp_path / "global_step2.old")
    (tmp_path / "global_step2.partial").mkdir()
    assert store.latest() == tmp_path / "global_step2.old"
    store.sweep()
    assert _names(tmp_path) == ["global_step1", "global_step2"]
    assert store.latest() == store.folder(2)


def test_the_next_save_sweeps_what_killed_ones_left_and_nothing_else(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "_actor", max_num=9, max_mem_gb=1, exports=tmp_path)
    store.sweep()
    _write(store, 4)
    # Replaced, but killed before the older one of the same step was removed; and one that was never complete.
    for name in ("global_step4.old", "global_step3.old", "global_step9.partial", "mine.partial", "mine.old"):
        (store.root / name).mkdir()
    (store.root / "global_step4.old" / "complete").touch()
    # Killed in its first export, in a second one over a first, and between moving weights and config.
    for step, complete in ((1, False), (2, True), (3, False)):
        _export(store, step, complete=complete)
        (store.export_folder(step) / ".partial").mkdir()
    _export(store, 5)
    store.sweep()
    assert _names(store.root) == ["global_step4", "mine.old", "mine.partial"]
    assert _names(tmp_path) == ["_actor", "global_step2_hf", "global_step5_hf"]
    assert _names(store.export_folder(2)) == []


@pytest.mark.parametrize("apart", [False, True])
def test_what_a_run_did_not_go_on_from_goes_before_its_next_save_and_no_sooner(tmp_path: Path, apart: bool) -> None:
    states = tmp_path / "_actor" if apart else tmp_path
    store = CheckpointStore(states, max_num=1, max_mem_gb=1, exports=tmp_path if apart else None)
    for step in (2, 4, 9):
        _write(store, step)
        _export(store, step)
    store.go_on_after(2)
    assert len(store.held()) == 6
    store.sweep()
    assert [path.name for path in store.held()] == ["global_step2", "global_step2_hf"]
    # What the run saves itself is its own, however often it sweeps.
    _write(store, 3)
    store.sweep()
    store.prune()
    assert [path.name for path in store.held()] == ["global_step3"]


def test_a_new_run_is_refused_a_folder_whose_checkpoints_would_outlive_its_own(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, max_num=9, max_mem_gb=1)
    refuse_other_run("states", [store], resumable=False)
    _write(store, 1, complete=False)
    _export(store, 1, complete=False)
    refuse_other_run("states", [store], resumable=False)
    for step in (2, 9, 10):
        _write(store, step)
    with pytest.raises(ConfigError) as caught:
        refuse_other_run("states", [store], resumable=True)
    assert str(caught.value) == (
        "--ckpt.path states holds states of another run (global_step2, global_step9, global_step10): add "
        "--ckpt.load_enable to go on from them, or name another folder."
    )
    _export(store, 11)
    with pytest.raises(ConfigError, match=r"\(global_step9, global_step10, global_step11_hf and older ones\)"):
        refuse_other_run("states", [store], resumable=True)


def test_exports_alone_are_refused_too_and_nobody_is_told_to_go_on_from_them(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "_actor", max_num=9, max_mem_gb=1, exports=tmp_path)
    _export(store, 3)
    with pytest.raises(ConfigError, match="holds checkpoints of another run .global_step3_hf.*cannot go on") as caught:
        refuse_other_run("states", [store], resumable=False)
    assert "load_enable" not in str(caught.value)
