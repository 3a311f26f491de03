"""Where the numbers of a run go: a JSONL file always, TensorBoard, W&B and MLflow where asked for."""

from __future__ import annotations

import html
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from openrlhf.config.ckpt import LoggerConfig, WandbConfig
from openrlhf.tracking.jsonl import JSONLFile
from openrlhf.tracking.mlflow_tracker import MlflowTracker

METRICS_FILE = "metrics.jsonl"
WANDB_OFFLINE = "offline"
WANDB_RUN_FILE = "wandb_run.txt"
"""Beside the metrics: the id of the W&B run, under which a resumed run goes on."""
WANDB_TIMEOUT_S = 60.0
WANDB_FINISH_TIMEOUT_S = 600.0


class Tracker(Protocol):
    """Takes the metrics of a run. Steps count from 1 and never go back."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes what was measured at ``step``; several calls a step add up."""

    def log_text(self, step: int, name: str, text: str) -> None:
        """Takes a text, a rollout for instance, where the tracker can show one."""

    def close(self) -> None:
        """Writes what is left; nothing may be logged afterwards."""


class JSONLTracker:
    """Writes ``metrics.jsonl``: one object a line with ``step``, ``time`` (seconds since 1970) and the metrics."""

    def __init__(self, path: Path | str, resume_step: int = 0) -> None:
        """Args: as ``JSONLFile``."""
        self._file = JSONLFile(path, resume_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one line, flushed; NaN and infinities become null."""
        self._file.write({"step": step, "time": round(time.time(), 3), **metrics})

    def log_text(self, step: int, name: str, text: str) -> None:
        """Texts have files of their own."""

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoardTracker:
    """Writes event files that TensorBoard shows."""

    def __init__(self, folder: Path | str, resume_step: int = 0) -> None:
        """Args: ``folder`` of the event files; ``resume_step``: what was logged after it is hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1 if resume_step else None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds one scalar a metric and flushes, so that a running job can be watched."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_text(self, step: int, name: str, text: str) -> None:
        """Adds a text as it is, not as Markdown."""
        self._writer.add_text(name, f"<pre>{html.escape(text)}</pre>", step)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


class WandbTracker:
    """Sends to Weights & Biases, or writes a run to disk that ``wandb sync`` sends later.

    W&B is an onlooker: where it cannot be reached the run goes on, offline at the start and without W&B later, and
    ``warn`` is told once.
    """

    def __init__(
        self,
        wandb_config: WandbConfig,
        folder: Path | str,
        run_config: Mapping[str, Any],
        warn: Callable[[str], None],
        timeout_s: float = WANDB_TIMEOUT_S,
        resume_step: int = 0,
    ) -> None:
        """Logs in and starts a run, or goes on with the one that ``folder`` remembers.

        Args:
            wandb_config: key, entity, group, project and run name; the key ``offline`` writes to disk only.
            folder: where W&B puts its files, and where the run's id is kept.
            run_config: the settings of the run, to be shown beside it.
            warn: told in one sentence what did not work.
            timeout_s: how long the server may take to answer at the start.
            resume_step: the step that a resumed run goes on from; 0 starts a new W&B run.
        """
        import wandb

        self._wandb, self._warn = wandb, warn
        self._alive = True
        Path(folder).mkdir(parents=True, exist_ok=True)
        remembered = Path(folder) / WANDB_RUN_FILE
        run_id = remembered.read_text().strip() if resume_step > 0 and remembered.exists() else ""
        # An id of our own, so that it is known also where the server is not reached at first.
        run_id = run_id or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:12]
        options = {
            "id": run_id,
            "resume": "allow",
            "entity": wandb_config.org,
            "group": wandb_config.group,
            "project": wandb_config.project,
            "name": wandb_config.run_name,
            "dir": str(folder),
            "config": dict(run_config),
        }
        remembered.write_text(run_id + "\n")
        # W&B would otherwise put itself between the run and the terminal, where the progress bars are.
        quiet = {"console": "off", "quiet": True}
        offline = WANDB_OFFLINE in (wandb_config.key, os.environ.get("WANDB_MODE"))
        if not offline:
            # The key goes with this run alone: wandb.login would write it to the user's netrc file.
            online = {"api_key": wandb_config.key, "init_timeout": timeout_s}
            # The end waits for the upload, but not for ever.
            online |= {"finish_timeout": WANDB_FINISH_TIMEOUT_S, "finish_timeout_raises": True}
            try:
                self._run = wandb.init(**options, settings=wandb.Settings(**quiet, **online))
                return
            except Exception as error:
                warn(
                    f"W&B did not start ({_first_line(error)}); writing the run to {folder}, send it with `wandb sync`"
                )
                wandb.teardown()
        self._run = wandb.init(**options, mode=WANDB_OFFLINE, settings=wandb.Settings(**quiet))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of a step."""
        self._try(lambda: self._run.log(dict(metrics), step=step))

    def log_text(self, step: int, name: str, text: str) -> None:
        """Sends a text as it is."""
        self._try(lambda: self._run.log({name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step=step))

    def close(self) -> None:
        """Ends the run."""
        self._try(lambda: self._run.finish())

    def _try(self, action: Callable[[], Any]) -> None:
        if not self._alive:
            return
        try:
            action()
        except Exception as error:
            self._alive = False
            self._warn(f"W&B failed ({_first_line(error)}); the run goes on without it, {METRICS_FILE} has all metrics")


class MultiTracker:
    """Hands every call to several trackers, and metrics only every so many steps."""

    def __init__(self, trackers: Sequence[Tracker], logging_steps: int = 1) -> None:
        """Args: ``logging_steps``: steps between two logged ones; the last step of a run is logged in any case."""
        if logging_steps < 1:
            raise ValueError(f"logging_steps must be 1 or more, got {logging_steps}")
        self.trackers = list(trackers)
        self.logging_steps = logging_steps
        self._held: tuple[int, dict[str, float]] | None = None

    def log(self, step: int, metrics: Mapping[str, float], always: bool = False) -> None:
        """Takes what was measured at ``step``.

        Args:
            always: logs at a step that is not a multiple of ``logging_steps`` too, for what is rare (an evaluation).
        """
        metrics = {name: _number(name, value) for name, value in metrics.items()}
        if always or step % self.logging_steps == 0:
            self._send(step, metrics)
        else:
            # An evaluation after a step adds to what the step has left.
            before = self._held[1] if self._held is not None and self._held[0] == step else {}
            self._held = (step, {**before, **metrics})

    def log_text(self, step: int, name: str, text: str) -> None:
        """Hands a text to all."""
        for tracker in self.trackers:
            tracker.log_text(step, name, text)

    def close(self) -> None:
        """Logs the last step if it was held back, and closes all, whatever one of them raises."""
        with ExitStack() as closing:
            for tracker in reversed(self.trackers):
                closing.callback(tracker.close)
            if self._held is not None:
                self._send(*self._held)

    def _send(self, step: int, metrics: dict[str, float]) -> None:
        if self._held is not None and self._held[0] <= step:
            # An evaluation at a held step takes that step's own numbers along.
            metrics = {**self._held[1], **metrics} if self._held[0] == step else metrics
            self._held = None
        for tracker in self.trackers:
            tracker.log(step, metrics)


def build_trackers(
    logger: LoggerConfig,
    output_dir: Path | str,
    *,
    run_name: str,
    run_config: Mapping[str, Any] | None = None,
    resume_step: int = 0,
    warn: Callable[[str], None] = print,
) -> MultiTracker:
    """The trackers that a run asks for.

    Args:
        logger: the ``logger`` settings.
        output_dir: folder of ``metrics.jsonl``; W&B's files go there too.
        run_name: folder below ``logger.tensorboard_dir``, and the name in W&B and MLflow where none is set.
        run_config: the resolved settings, shown by W&B and MLflow.
        resume_step: the step that a resumed run goes on from; 0 for a new run.
        warn: told in one sentence what did not work.
    """
    trackers: list[Tracker] = [JSONLTracker(Path(output_dir) / METRICS_FILE, resume_step)]
    if logger.tensorboard_dir:
        trackers.append(TensorBoardTracker(Path(logger.tensorboard_dir) / run_name, resume_step))
    if logger.wandb.key:
        named = _named(logger.wandb, run_name)
        trackers.append(WandbTracker(named, output_dir, run_config or {}, warn, resume_step=resume_step))
    if logger.mlflow.tracking_uri:
        mlflow = replace(logger.mlflow, run_name=logger.mlflow.run_name or run_name)
        trackers.append(MlflowTracker(mlflow, output_dir, run_config or {}, warn, resume_step))
    return MultiTracker(trackers, logger.logging_steps)


def _named(config: WandbConfig, run_name: str) -> WandbConfig:
    return config if config.run_name else replace(config, run_name=run_name)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"metric {name} is not a number: {value!r}") from None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
