"""Metrics of a run in MLflow, on a server or in a folder."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from openrlhf.config.ckpt import MlflowConfig

MLFLOW_RUN_FILE = "mlflow_run.txt"
"""Beside the metrics: the id of the MLflow run, under which a resumed run goes on."""

# MLflow takes no other characters in the names of metrics and files.
_FOREIGN = re.compile(r"[^\w\-. /]", re.ASCII)

# What MLflow reads from the environment, where nobody has set it: a run must not wait for minutes for an onlooker.
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # A folder is used where --logger.mlflow.tracking_uri names one; MLflow would ask for a database instead.
    "MLFLOW_ALLOW_FILE_STORE": "true",
}


def mlflow_name(name: str) -> str:
    """Returns: a metric's name as MLflow takes it; characters that it refuses become an underscore."""
    return "/".join(part for part in _FOREIGN.sub("_", name).split("/") if part not in ("", ".", "..")) or "_"


class MlflowTracker:
    """Sends metrics to MLflow.

    MLflow is an onlooker: where it cannot be reached or fails, the run goes on without it, and ``warn`` is told once.
    Files are stored elsewhere than metrics, so where it takes none of them, metrics still go there.
    """

    def __init__(
        self,
        config: MlflowConfig,
        folder: Path | str,
        run_config: Mapping[str, Any],
        warn: Callable[[str], None],
        resume_step: int = 0,
    ) -> None:
        """Starts a run, or goes on with the one that ``folder`` remembers.

        Args:
            config: where to send, and under which names.
            folder: where the run's id is kept.
            run_config: the settings of the run, which become files beside its metrics.
            warn: told in one sentence what did not work, once of each.
            resume_step: the step that a resumed run goes on from; 0 starts a new MLflow run.
        """
        self._warn = warn
        self._alive = self._takes_files = True
        self._run_id = ""
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        remembered = Path(folder) / MLFLOW_RUN_FILE
        earlier = self._earlier(remembered) if resume_step > 0 else ""

        def start() -> None:
            from mlflow import MlflowClient

            self._client = MlflowClient(tracking_uri=config.tracking_uri)
            if earlier:
                self._client.update_run(earlier, status="RUNNING")
                self._run_id = earlier
            else:
                self._run_id = self._client.create_run(self._experiment(config), run_name=config.run_name).info.run_id

        self._try(start)
        if self._alive and not earlier:
            self._remember(remembered)
        for name, text in run_config.items():
            self._upload(f"{name}.yaml", str(text))

    def _earlier(self, remembered: Path) -> str:
        """Returns: the id of the run to go on with; an empty text where there is none."""
        try:
            return remembered.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return ""
        except (OSError, ValueError) as error:
            self._warn(f"{remembered} cannot be read ({_reason(error)}); MLflow gets a new run for the steps to come")
            return ""

    def _remember(self, remembered: Path) -> None:
        try:
            remembered.parent.mkdir(parents=True, exist_ok=True)
            remembered.write_text(self._run_id + "\n", encoding="utf-8")
        except OSError as error:
            self._warn(
                f"{remembered} cannot be written ({_reason(error)}); a resumed run will begin a new one in MLflow"
            )

    def _experiment(self, config: MlflowConfig) -> str:
        found = self._client.get_experiment_by_name(config.experiment)
        return self._client.create_experiment(config.experiment) if found is None else found.experiment_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of a step, in one request."""

        def send() -> None:
            from mlflow.entities import Metric

            now = int(time.time() * 1000)
            entries = [Metric(mlflow_name(name), float(value), now, step) for name, value in metrics.items()]
            self._client.log_batch(self._run_id, metrics=entries)

        self._try(send)

    def log_text(self, step: int, name: str, text: str) -> None:
        """Sends a text as a file of its step."""
        self._upload(f"{mlflow_name(name)}/{step}.txt", text)

    def close(self) -> None:
        """Ends the run."""
        self._try(lambda: self._client.set_terminated(self._run_id))

    def _upload(self, file: str, text: str) -> None:
        if not (self._alive and self._takes_files):
            return
        try:
            self._client.log_text(self._run_id, text, file)
        except Exception as error:
            self._takes_files = False
            self._warn(f"MLflow did not take {file} ({_reason(error)}); it gets no more files, metrics still go there")

    def _try(self, action: Callable[[], Any]) -> None:
        if not self._alive:
            return
        try:
            action()
        except Exception as error:
            self._alive = False
            self._warn(f"MLflow failed ({_reason(error)}); the run goes on without it, metrics.jsonl has all metrics")


def _reason(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
