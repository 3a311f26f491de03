"""Where metrics go, and that what is on disk survives a kill, a resume and an unreachable server."""

import json
import math
import os
import subprocess
import sys
import time

import pytest
import torch

from openrlhf.config.ckpt import LoggerConfig, WandbConfig
from openrlhf.tracking.jsonl import JSONLFile, read_jsonl
from openrlhf.tracking.metrics import JSONLTracker, MultiTracker, WandbTracker, build_trackers
from openrlhf.tracking.rollouts import RolloutRecord, RolloutWriter


class Recorder:
    """A tracker that keeps what it is given."""

    def __init__(self):
        self.lines, self.texts, self.closed = [], [], False

    def log(self, step, metrics):
        self.lines.append((step, dict(metrics)))

    def log_text(self, step, name, text):
        self.texts.append((step, name, text))

    def close(self):
        self.closed = True


def test_a_last_line_that_ends_inside_a_character_is_passed_over(tmp_path):
    whole = json.dumps({"step": 1, "text": "\u6570"}, ensure_ascii=False).encode() + b"\n"
    (tmp_path / "rollouts.jsonl").write_bytes(whole + whole[:-4])
    assert [row["step"] for row in read_jsonl(tmp_path / "rollouts.jsonl")] == [1]


def test_every_line_is_on_disk_before_log_returns(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    tracker = JSONLTracker(path)
    tracker.log(1, {"reward/mean": 0.5})
    assert [(row["step"], row["reward/mean"]) for row in read_jsonl(path)] == [(1, 0.5)]
    tracker.close()


def test_lines_are_valid_json_even_for_nan_infinity_and_tensors(tmp_path):
    file = JSONLFile(tmp_path / "m.jsonl")
    file.write({"step": 1, "a": math.nan, "b": -math.inf, "c": torch.tensor(0.5), "d": [1, {"e": None}], "f": {1: "ü"}})
    file.close()
    line = (tmp_path / "m.jsonl").read_text()
    assert "ü" in line

    def refuse(name):
        raise AssertionError(name)

    row = json.loads(line, parse_constant=refuse)
    assert row == {"step": 1, "a": None, "b": None, "c": 0.5, "d": [1, {"e": None}], "f": {"1": "ü"}}


def test_a_resumed_run_has_every_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = JSONLTracker(path)
    for step in range(1, 6):
        first.log(step, {"x": step})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 6, "x"')  # what a kill leaves
    second = JSONLTracker(path, resume_step=3)
    for step in range(4, 8):
        second.log(step, {"x": 10 * step})
    second.close()
    assert [(r["step"], r["x"]) for r in read_jsonl(path)] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 40),
        (5, 50),
        (6, 60),
        (7, 70),
    ]


def test_a_new_run_in_an_old_folder_keeps_the_old_file_beside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for value in (1, 2):
        tracker = JSONLTracker(path)
        tracker.log(1, {"x": value})
        tracker.close()
    assert [row["x"] for row in read_jsonl(path)] == [2]
    assert [row["x"] for row in read_jsonl(tmp_path / "metrics.previous.jsonl")] == [1]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(ValueError, match="m.jsonl, line 2"):
        read_jsonl(tmp_path / "m.jsonl")
    assert read_jsonl(tmp_path / "absent.jsonl") == []


def test_a_full_disk_names_the_file_once_and_closing_adds_no_second_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    file = JSONLFile(path)
    with pytest.raises(OSError, match="No space left on device.*metrics.jsonl"):
        file.write({"step": 1})
    file.close()


def test_only_every_so_many_steps_are_logged_and_the_last_one():
    recorder = Recorder()
    tracker = MultiTracker([recorder], logging_steps=3)
    for step in range(1, 9):
        tracker.log(step, {"x": step})
    tracker.close()
    assert [step for step, _ in recorder.lines] == [3, 6, 8] and recorder.closed


def test_all_are_closed_whatever_one_of_them_raises():
    class Full(Recorder):
        def log(self, step, metrics):
            raise OSError("no space")

        def close(self):
            super().close()
            raise RuntimeError("gone")

    first, full, last = Recorder(), Full(), Recorder()
    tracker = MultiTracker([first, full, last], logging_steps=3)
    tracker.log(4, {"x": 4})
    with pytest.raises((OSError, RuntimeError), match="no space|gone"):
        tracker.close()
    assert first.closed and full.closed and last.closed


def test_an_evaluation_is_logged_at_any_step_with_the_numbers_of_its_step():
    recorder = Recorder()
    tracker = MultiTracker([recorder], logging_steps=3)
    tracker.log(4, {"x": 4})
    tracker.log(4, {"eval": 1}, always=True)
    tracker.log(5, {"x": 5})
    tracker.log(6, {"x": 6})
    tracker.close()
    assert recorder.lines == [(4, {"x": 4.0, "eval": 1.0}), (6, {"x": 6.0})]


@pytest.mark.parametrize("always", [False, True])
def test_two_parts_of_a_held_step_are_logged_as_one_line(always):
    recorder = Recorder()
    tracker = MultiTracker([recorder], logging_steps=3)
    tracker.log(4, {"x": 4, "y": 1})
    tracker.log(4, {"y": 2, "eval": 1}, always=always)
    tracker.close()
    assert recorder.lines == [(4, {"x": 4.0, "y": 2.0, "eval": 1.0})]


def test_what_is_no_number_is_refused_by_name_and_a_text_goes_to_all():
    recorder = Recorder()
    tracker = MultiTracker([recorder])
    with pytest.raises(TypeError, match="metric reward/mean is not a number"):
        tracker.log(1, {"reward/mean": None})
    tracker.log_text(1, "rollout", "text")
    assert recorder.texts == [(1, "rollout", "text")]
    with pytest.raises(ValueError, match="logging_steps must be 1 or more"):
        MultiTracker([], 0)


def test_tensorboard_reads_back_what_was_logged(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = LoggerConfig(tensorboard_dir=str(tmp_path / "tb"))
    tracker = build_trackers(logger, tmp_path / "out", run_name="run")
    for step in (1, 2):
        tracker.log(step, {"reward/mean": step / 4})
    tracker.log_text(2, "rollout", "<b>")
    events = EventAccumulator(str(tmp_path / "tb" / "run")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    tracker.close()
    assert [row["reward/mean"] for row in read_jsonl(tmp_path / "out" / "metrics.jsonl")] == [0.25, 0.5]


def test_tensorboard_shows_the_steps_of_a_resumed_run_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = LoggerConfig(tensorboard_dir=str(tmp_path / "tb"))
    for resume_step, steps, value in ((0, (1, 2, 3), 1.0), (1, (2, 3, 4), 2.0)):
        tracker = build_trackers(logger, tmp_path / "out", run_name="run", resume_step=resume_step)
        for step in steps:
            tracker.log(step, {"x": value})
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tb" / "run")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("x")] == [(1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)]


def test_without_a_key_wandb_is_neither_used_nor_imported(tmp_path):
    script = (
        "import sys; from openrlhf.config.ckpt import LoggerConfig;"
        "from openrlhf.tracking.metrics import build_trackers;"
        f"t = build_trackers(LoggerConfig(), {str(tmp_path)!r}, run_name='r'); t.log(1, {{'x': 1}}); t.close();"
        "print([m for m in ('wandb', 'torch', 'tensorboard') if m in sys.modules])"
    )
    env = {**os.environ, "WANDB_API_KEY": "a" * 40}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=env)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.timeout(120)
def test_wandb_offline_writes_a_run_to_disk_with_its_metrics(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    warnings = []
    logger = LoggerConfig(wandb=WandbConfig(key="offline", project="p"))
    config = {"actor.adam.lr": 1e-3}
    tracker = build_trackers(logger, tmp_path, run_name="named", run_config=config, warn=warnings.append)
    tracker.log(1, {"reward/mean": 0.25})
    tracker.log_text(1, "rollout", "3+4=7")
    tracker.close()
    (run,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    # W&B's own process writes the file, and may do so after `finish` has returned.
    deadline = time.monotonic() + 60
    while b"reward/mean" not in run.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.2)
    content = run.read_bytes()
    assert b"reward/mean" in content and b"0.25" in content and b"named" in content and warnings == []


def wandb_ids(folder):
    return [path.name.split("-")[3] for path in sorted((folder / "wandb").glob("offline-run-*"))]


@pytest.mark.timeout(200)
def test_a_resumed_run_goes_on_with_its_wandb_run_and_a_new_one_begins_another(tmp_path):
    logger = LoggerConfig(wandb=WandbConfig(key="offline", project="p"))
    warnings = []

    def log(resume_step, *steps):
        tracker = build_trackers(logger, tmp_path, run_name="r", resume_step=resume_step, warn=warnings.append)
        for step in steps:
            tracker.log(step, {"x": float(step)})
        tracker.close()

    log(0, 1, 2, 3)
    (begun,) = wandb_ids(tmp_path)
    assert (tmp_path / "wandb_run.txt").read_text() == f"{begun}\n"
    log(2, 3, 4)
    assert set(wandb_ids(tmp_path)) == {begun}
    log(0, 1)
    assert len(set(wandb_ids(tmp_path))) == 2
    assert (tmp_path / "wandb_run.txt").read_text().strip() not in ("", begun)
    # Metrics of a folder that W&B never knew, or whose file was emptied, go on under a new id.
    (tmp_path / "wandb_run.txt").write_text("")
    log(1, 2)
    assert len(set(wandb_ids(tmp_path))) == 3 and warnings == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("key", ["a" * 40, "short"])
def test_an_unreachable_wandb_is_said_and_the_run_goes_on_offline(tmp_path, monkeypatch, key):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    warnings = []
    tracker = WandbTracker(WandbConfig(key=key, run_name="r"), tmp_path, {}, warnings.append, timeout_s=2)
    tracker.log(1, {"x": 1.0})
    tracker.close()
    assert len(warnings) == 1 and warnings[0].startswith("W&B did not start") and "wandb sync" in warnings[0]
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))


@pytest.mark.timeout(120)
def test_a_wandb_that_fails_later_is_said_once_and_the_run_goes_on(tmp_path):
    warnings = []
    tracker = WandbTracker(WandbConfig(key="offline", run_name="r"), tmp_path, {}, warnings.append)
    tracker._run.finish()
    for step in (1, 2):
        tracker.log(step, {"x": 1.0})
    tracker.close()
    assert len(warnings) == 1 and "the run goes on without it" in warnings[0]


def test_rollouts_are_written_with_all_that_a_reader_needs_and_cut_on_resume(tmp_path):
    writer = RolloutWriter(tmp_path)
    for step in (1, 2):
        writer.write(
            step, [RolloutRecord(prompt="1+1=", response="2", label=2, reward=1.0, tokens=2, weight_version=step)]
        )
    writer.close()
    writer = RolloutWriter(tmp_path, resume_step=1)
    writer.write(
        2, [RolloutRecord("1+2=", "9<script>", reward=None, failure="timeout", truncated=True, stop_reason="length")]
    )
    writer.close()
    first, second = read_jsonl(tmp_path / "rollouts.jsonl")
    assert first == {
        "step": 1, "prompt": "1+1=", "response": "2", "label": 2, "reward": 1.0, "score": None, "tokens": 2,
        "truncated": False, "stop_reason": "stop", "weight_version": 1, "group_id": 0, "sample_id": 0, "failure": None,
        "extra_logs": {},
    }  # fmt: skip
    assert (second["reward"], second["failure"], second["stop_reason"]) == (None, "timeout", "length")
