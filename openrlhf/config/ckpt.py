"""What is kept: the `ckpt` and `logger` groups."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated

from openrlhf.config.errors import ConfigError
from openrlhf.config.flags import Secret


@dataclass(frozen=True)
class CkptConfig:
    """Checkpoints and exports."""

    output_dir: str = "./ckpt"
    """Folder of the final HF model, the metrics and the report."""
    path: str = "./ckpt/checkpoints"
    """Folder of states that a run can resume from."""
    save_steps: int = -1
    """Steps between checkpoints; -1 never."""
    save_hf: bool = False
    """Write a HF folder with every checkpoint."""
    disable_ds: bool = False
    """Write no resumable state with a checkpoint, only what --ckpt.save_hf asks for."""
    max_num: int = 3
    """Checkpoints to keep; the oldest go first."""
    max_mem: int = 100_000_000
    """Disk space in GB that checkpoints may take together; the oldest go first."""
    load_enable: bool = False
    """Resume from the newest state under --ckpt.path, if there is one."""


@dataclass(frozen=True)
class PPOCkptConfig(CkptConfig):
    """Checkpoints and exports of RL."""

    path: str = "./ckpt/checkpoints_ppo_ray"
    """Folder of states that a run can resume from (below it _actor and _critic)."""
    max_num: int = 3
    """Checkpoints to keep, among them the newest and the one of the best evaluation; the oldest others go first."""
    max_mem: float = float("inf")
    """Disk space in GB that checkpoints of actor and critic may take together; they go as under --ckpt.max_num."""
    best_metric_key: str = ""
    """Evaluation metric: of its best model --ckpt.path keeps state and best_hf; empty the first pass1, none neither."""


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases; off while the key is unset."""

    key: Annotated[str | None, Secret(plain=("offline",))] = None
    """API key, or offline to write runs to disk; the key is written to no file."""
    org: str | None = None
    """Entity that owns the run."""
    group: str | None = None
    """Group of the run."""
    project: str = "openrlhf"
    """Project of the run."""
    run_name: str | None = None
    """Name of the run; unset becomes <command>_%m%dT%H:%M at the start."""


@dataclass(frozen=True)
class MlflowConfig:
    """MLflow; off while the address is unset."""

    tracking_uri: str | None = None
    """Where MLflow keeps runs: http://host:5000, or a folder; user name and password come from its own variables
    (MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN)."""
    experiment: str = "openrlhf"
    """Experiment of the run."""
    run_name: str | None = None
    """Name of the run; unset takes that of --logger.wandb.run_name."""


@dataclass(frozen=True)
class LoggerConfig:
    """Metrics, beside metrics.jsonl which is always written."""

    logging_steps: int = 1
    """Steps between two lines of metrics."""
    tensorboard_dir: str | None = None
    """Folder of TensorBoard event files; unset writes none."""
    profile_steps: str | None = None
    """Steps to trace with torch.profiler: 4, or 3:5 for the third to the fifth; unset traces none."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)

    @property
    def profiled(self) -> tuple[int, int] | None:
        """First and last step of --logger.profile_steps, counted from 1. Raises: ConfigError."""
        if self.profile_steps is None:
            return None
        found = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", self.profile_steps)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last:
            raise ConfigError(
                "--logger.profile_steps takes a step, such as 4, or the first and the last one, such as 3:5, counted "
                f"from 1; found {self.profile_steps!r}."
            )
        return first, last


def logger_of(project: str) -> LoggerConfig:
    """Returns: the default logger with a W&B project and an MLflow experiment of the command's own."""
    return LoggerConfig(wandb=WandbConfig(project=project), mlflow=MlflowConfig(experiment=project))
