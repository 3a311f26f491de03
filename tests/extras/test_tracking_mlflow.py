"""MLflow gets the metrics of a run, and a run goes on where it does not."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from openrlhf.config import ConfigError, LoggerConfig, MlflowConfig, check
from openrlhf.config.notes import notes
from openrlhf.tracking.jsonl import read_jsonl
from openrlhf.tracking.metrics import build_trackers
from openrlhf.tracking.mlflow_tracker import mlflow_name
from tests.unit.config_args import SFT, built, make_files

FLAG = "--logger.mlflow.tracking_uri"


@pytest.fixture
def store(tmp_path):
    return f"file://{tmp_path}/mlflow"


def client_of(uri):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def opened(tmp_path, uri, warnings, resume_step=0, **mlflow):
    logger = LoggerConfig(mlflow=MlflowConfig(tracking_uri=uri, experiment="sums", **mlflow))
    flags = {"flags": "train:\n  seed: 3\n"}
    return build_trackers(
        logger, tmp_path / "out", run_name="named", run_config=flags, resume_step=resume_step, warn=warnings.append
    )


def test_metrics_texts_and_settings_are_read_back_under_their_names(tmp_path, store):
    warnings = []
    tracker = opened(tmp_path, store, warnings)
    tracker.log(1, {"loss/train": 0.5, "reward/mean": math.nan})
    tracker.log(2, {"loss/train": 0.25, "eval/math (hard)_pass1": 1.0})
    tracker.log_text(2, "rollout", "3+4=7")
    tracker.close()

    client = client_of(store)
    (run,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert (run.info.run_name, run.info.status) == ("named", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "loss/train")
    assert [(entry.step, entry.value) for entry in history] == [(1, 0.5), (2, 0.25)]
    assert run.data.metrics["eval/math _hard__pass1"] == 1.0
    files = tmp_path / "mlflow" / run.info.experiment_id / run.info.run_id / "artifacts"
    assert (files / "flags.yaml").read_text() == "train:\n  seed: 3\n"
    assert (files / "rollout" / "2.txt").read_text() == "3+4=7"
    assert (tmp_path / "out" / "mlflow_run.txt").read_text() == f"{run.info.run_id}\n"
    assert warnings == []


def test_a_resumed_run_goes_on_with_its_mlflow_run_and_a_new_one_begins_another(tmp_path, store):
    warnings = []
    for resume_step, step in ((0, 1), (1, 2), (0, 1)):
        tracker = opened(tmp_path, store, warnings, resume_step, run_name="mine")
        tracker.log(step, {"x": float(step)})
        tracker.close()
    client = client_of(store)
    runs = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    steps = [[entry.step for entry in client.get_metric_history(run.info.run_id, "x")] for run in runs]
    assert sorted(steps) == [[1], [1, 2]] and {run.info.run_name for run in runs} == {"mine"}
    assert warnings == []


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "nosuchscheme://host"])
def test_an_mlflow_that_cannot_be_reached_is_said_once_and_the_run_goes_on(uri, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    warnings = []
    tracker = opened(tmp_path, uri, warnings)
    for step in (1, 2):
        tracker.log(step, {"x": 1.0})
    tracker.close()
    assert len(warnings) == 1 and warnings[0].startswith("MLflow failed (") and "\n" not in warnings[0]
    assert [row["step"] for row in read_jsonl(tmp_path / "out" / "metrics.jsonl")] == [1, 2]


def test_an_mlflow_that_fails_later_is_said_once_and_a_run_that_it_forgot_too(tmp_path, store):
    warnings = []
    tracker = opened(tmp_path, store, warnings)
    client = client_of(store)
    (run_id,) = (tmp_path / "out" / "mlflow_run.txt").read_text().split()
    client.delete_run(run_id)
    for step in (1, 2):
        tracker.log(step, {"x": 1.0})
    assert len(warnings) == 1 and "the run goes on without it" in warnings[0]
    (tmp_path / "out" / "mlflow_run.txt").write_text("0" * 32)
    opened(tmp_path, store, warnings, resume_step=1).close()
    assert len(warnings) == 2 and "0" * 32 in warnings[1]


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None])
def test_an_id_of_a_run_that_cannot_be_read_is_told_and_training_goes_on_under_a_new_one(content, tmp_path, store):
    file, warnings = tmp_path / "out" / "mlflow_run.txt", []
    file.parent.mkdir()
    file.mkdir() if content is None else file.write_bytes(content)
    tracker = opened(tmp_path, store, warnings, resume_step=1)
    tracker.log(2, {"x": 1.0})
    tracker.close()
    assert warnings[0].startswith(f"{file} cannot be read (") and warnings[0].endswith(
        "a new run for the steps to come"
    )
    client = client_of(store)
    (run,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert [entry.step for entry in client.get_metric_history(run.info.run_id, "x")] == [2]
    if content is None:
        assert len(warnings) == 2 and "mlflow_run.txt cannot be written (" in warnings[1]
    else:
        assert len(warnings) == 1 and file.read_text() == f"{run.info.run_id}\n"


def test_an_mlflow_that_takes_no_files_still_gets_the_metrics_and_it_is_said_once(tmp_path, store):
    client, warnings = client_of(store), []
    (tmp_path / "blocked").write_text("a file where files are to be stored")
    client.create_experiment("sums", artifact_location=f"file://{tmp_path}/blocked/below")
    tracker = opened(tmp_path, store, warnings)
    for step in (1, 2):
        tracker.log(step, {"x": float(step)})
        tracker.log_text(step, "rollout", "3+4=7")
    tracker.close()
    assert len(warnings) == 1 and warnings[0].startswith("MLflow did not take flags.yaml (")
    (run,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert [entry.value for entry in client.get_metric_history(run.info.run_id, "x")] == [1.0, 2.0]
    assert run.info.status == "FINISHED"


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("loss/train", "loss/train"),
        ("eval/gsm8k_pass1", "eval/gsm8k_pass1"),
        ("eval/a=b,ü_pass1", "eval/a_b___pass1"),
        ("a//b/../c", "a/b/c"),
    ],
)
def test_a_name_keeps_all_that_mlflow_takes(name, taken):
    assert mlflow_name(name) == taken


def test_without_an_address_mlflow_is_not_imported(tmp_path):
    script = (
        "import sys; from openrlhf.config.ckpt import LoggerConfig;"
        "from openrlhf.tracking.metrics import build_trackers;"
        f"build_trackers(LoggerConfig(), {str(tmp_path)!r}, run_name='r').close(); print('mlflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_flags_of_mlflow_are_checked_at_the_start(tmp_path, monkeypatch):
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    check(built("train_sft", SFT, FLAG, "http://host:5000"))
    with pytest.raises(ConfigError, match=f"{FLAG} holds a user name .* MLFLOW_TRACKING_PASSWORD"):
        check(built("train_sft", SFT, FLAG, "https://me:secret@host/mlflow"))
    with pytest.raises(ConfigError, match=f"{FLAG} is empty"):
        check(built("train_sft", SFT, FLAG, ""))
    monkeypatch.setattr("openrlhf.config.checks_system.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package mlflow-skinny; pip install 'openrlhf\[mlflow\]'"):
        check(built("train_sft", SFT, FLAG, "http://host:5000"))
    idle = notes(built("train_sft", SFT, "--logger.mlflow.experiment", "x"))
    assert f"--logger.mlflow.experiment has no effect without {FLAG}." in idle
