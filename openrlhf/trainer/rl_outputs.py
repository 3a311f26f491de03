"""What an RL run leaves behind: metrics, rollouts, checkpoints, the exported model, the report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openrlhf.backends.checkpoints import CheckpointStore
from openrlhf.config import ConfigError, LoggerConfig, PPOCkptConfig
from openrlhf.data.trajectory import Trajectory
from openrlhf.tracking.metrics import MultiTracker, build_trackers
from openrlhf.tracking.progress import Console
from openrlhf.tracking.report import write_report
from openrlhf.tracking.rollouts import RolloutRecord, RolloutWriter
from openrlhf.trainer.controller import Position, RLController
from openrlhf.trainer.rl_metrics import StepMetrics
from openrlhf.trainer.workers import WorkerGroup
from openrlhf.utils.errors import RunError

CONFIG_FILE = "config.yaml"


@contextmanager
def _naming_the_disk(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"{what} failed: {error}") from error


@dataclass(frozen=True)
class OutputSettings:
    """The parts of the settings that decide what is written.

    Attributes:
        save_samples: samples of a step that go into rollouts.jsonl.
        timeout: seconds that the ranks may take to write.
        fixed: what a resumed run must share with the one it goes on from, by flag, since order, seeds and schedule
            follow from it.
        config_yaml: all settings.
    """

    ckpt: PPOCkptConfig
    logger: LoggerConfig
    save_samples: int
    timeout: float
    fixed: dict[str, Any]
    config_yaml: str


class RLOutputs:
    """Writes after each step and at the end; every file is whole at any moment."""

    def __init__(
        self,
        settings: OutputSettings,
        controller: RLController,
        actor: WorkerGroup,
        tokenizer: Any,
        console: Console,
    ) -> None:
        self._settings = settings
        self._ckpt = settings.ckpt
        self._controller = controller
        self._actor = actor
        self._tokenizer = tokenizer
        self._console = console
        self._folder = Path(settings.ckpt.output_dir)
        self._timeout = settings.timeout
        self._store = CheckpointStore(
            Path(settings.ckpt.path) / "_actor",
            max_num=settings.ckpt.max_num,
            max_mem_gb=settings.ckpt.max_mem,
            exports=Path(settings.ckpt.path),
        )
        self._trackers: MultiTracker | None = None
        self._rollouts: RolloutWriter | None = None

    def resume(self) -> None:
        """Goes on from the newest checkpoint where that is asked for, and opens the run's files.

        Raises: ConfigError, where the checkpoint belongs to a run with other settings.
        """
        latest = self._store.latest() if self._ckpt.load_enable else None
        if latest is not None:
            self._load(latest)
        elif self._ckpt.load_enable:
            self._console.note(f"--ckpt.load_enable: no checkpoint under {self._ckpt.path}, starting anew")
        step = self._controller.position.step
        self._console.begin(step)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / CONFIG_FILE).write_text(self._settings.config_yaml)
        self._trackers = build_trackers(
            self._settings.logger,
            self._folder,
            run_name=self._settings.logger.wandb.run_name or "train_ppo_ray",
            run_config={"flags": self._settings.config_yaml},
            resume_step=step,
            warn=self._console.warn,
        )
        self._rollouts = RolloutWriter(self._folder, resume_step=step)

    def _load(self, folder: Path) -> None:
        state = self._actor.call("load_checkpoint", str(folder), timeout=self._timeout)[0]
        for flag, here in self._settings.fixed.items():
            there = state["fixed"].get(flag, here)
            if there != here:
                raise ConfigError(
                    f"--ckpt.load_enable: {folder} was written with {flag} {there}, and this run has {here}: resume "
                    "with the same, or start anew without the flag."
                )
        self._controller.sampler.load_state_dict(state["sampler"])
        self._controller.position = Position(**state["position"])
        self._console.note(f"resuming after step {self._controller.position.step} from {folder}")

    def after_step(self, metrics: StepMetrics) -> None:
        """Records a step and, where it is due, writes a checkpoint."""
        step = self._controller.position.step
        if self._trackers is None or self._rollouts is None:
            raise RuntimeError("resume() opens the files, and comes before the first step")
        with _naming_the_disk(f"writing the metrics of step {step}"):
            self._trackers.log(step, metrics.values)
            self._rollouts.write(step, [self._record(sample) for sample in self._shown(metrics.trajectories)])
        if step % self._settings.logger.logging_steps == 0:
            self._console.step(step, metrics.values)
        every = self._ckpt.save_steps
        if every > 0 and step % every == 0:
            self._checkpoint(step)

    def finish(self) -> None:
        """Exports the policy and writes the report."""
        with _naming_the_disk(f"writing the results to {self._folder}"):
            self._export(self._folder)
            self.close()
            report = write_report(self._folder, "Reinforcement learning")
        self._console.note(f"model, metrics and rollouts: {self._folder}; report: {report}")

    def close(self) -> None:
        """Flushes what is open, also after a failure."""
        for open_file in (self._trackers, self._rollouts):
            if open_file is not None:
                open_file.close()
        self._trackers, self._rollouts = None, None

    def _checkpoint(self, step: int) -> None:
        with _naming_the_disk(f"writing the checkpoint of step {step}"):
            self._store.sweep()
            if not self._ckpt.disable_ds:
                self._save_state(self._store.folder(step))
            if self._ckpt.save_hf:
                self._export(self._store.export_folder(step))
            self._store.prune()

    def _save_state(self, folder: Path) -> None:
        state = {
            "position": asdict(self._controller.position),
            "sampler": self._controller.sampler.state_dict(),
            "fixed": self._settings.fixed,
        }
        self._actor.call("save_checkpoint", str(folder), state, timeout=self._timeout)
        (folder / CONFIG_FILE).write_text(self._settings.config_yaml)

    def _export(self, folder: Path) -> None:
        self._actor.call("save_hf", str(folder), timeout=self._timeout)
        self._tokenizer.save_pretrained(folder)
        (folder / CONFIG_FILE).write_text(self._settings.config_yaml)

    def _shown(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        return trajectories[: self._settings.save_samples]

    def _record(self, trajectory: Trajectory) -> RolloutRecord:
        segment = trajectory.segments[-1] if trajectory.segments else None
        response = ""
        if segment is not None and segment.action_ranges:
            response = self._tokenizer.decode(segment.tokens[segment.action_ranges[0][0] :], skip_special_tokens=False)
        return RolloutRecord(
            prompt=trajectory.prompt,
            response=response,
            label=trajectory.label,
            reward=trajectory.reward,
            score=trajectory.score,
            tokens=trajectory.response_length,
            truncated=trajectory.truncated,
            stop_reason=segment.stop_reason if segment is not None else "error",
            weight_version=segment.weight_versions[-1] if segment is not None and segment.weight_versions else 0,
            group_id=trajectory.group_id,
            sample_id=trajectory.sample_id,
            failure=trajectory.failure,
            extra_logs=trajectory.extra_logs,
        )
