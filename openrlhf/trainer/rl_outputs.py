"""What an RL run leaves behind: metrics, rollouts, checkpoints, the exported model, the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf.backends.checkpoints import CheckpointStore
from openrlhf.config import ConfigError, LoggerConfig, PPOCkptConfig
from openrlhf.data.trajectory import Trajectory
from openrlhf.tracking.metrics import MultiTracker, build_trackers
from openrlhf.tracking.progress import Console
from openrlhf.tracking.report import write_report
from openrlhf.tracking.rollouts import RolloutRecord, RolloutWriter
from openrlhf.trainer.best import BestModel
from openrlhf.trainer.controller import Models, RLController
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
        save_critic: export the critic too, to ``<output_dir>_critic``.
        save_ema: export the moving average of the policy too, to ``<output_dir>_ema``.
    """

    ckpt: PPOCkptConfig
    logger: LoggerConfig
    save_samples: int
    timeout: float
    fixed: dict[str, Any]
    config_yaml: str
    save_critic: bool = False
    save_ema: bool = False


class RLOutputs:
    """Writes after each step and at the end; every file is whole at any moment."""

    def __init__(
        self,
        settings: OutputSettings,
        controller: RLController,
        models: Models,
        tokenizer: Any,
        console: Console,
    ) -> None:
        self._settings = settings
        self._ckpt = settings.ckpt
        self._controller = controller
        self._models = models
        self._tokenizer = tokenizer
        self._console = console
        self._folder = Path(settings.ckpt.output_dir)
        self._timeout = settings.timeout
        path = Path(settings.ckpt.path)
        limits = {"max_num": settings.ckpt.max_num, "max_mem_gb": settings.ckpt.max_mem}
        self._store = CheckpointStore(path / "_actor", **limits, exports=path)
        self._critic_store = None if models.critic is None else CheckpointStore(path / "_critic", **limits)
        self._best = BestModel(settings.ckpt.best_metric_key, path / "best_hf")
        self._trackers: MultiTracker | None = None
        self._rollouts: RolloutWriter | None = None

    def resume(self) -> None:
        """Goes on from the newest checkpoint where that is asked for, and opens the run's files.

        Raises: ConfigError, where the checkpoint belongs to a run with other settings.
        """
        latest = self._latest() if self._ckpt.load_enable else None
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

    def _latest(self) -> Path | None:
        """The newest state of the actor; a critic must have one of the same step."""
        critic = None if self._critic_store is None else {path.name for path in self._critic_store.complete()}
        states = [path for path in self._store.complete() if critic is None or path.name in critic]
        return states[-1] if states else None

    def _load(self, folder: Path) -> None:
        state = self._models.actor.call("load_checkpoint", str(folder), timeout=self._timeout)[0]
        for flag, here in self._settings.fixed.items():
            there = state["fixed"].get(flag, here)
            if there != here:
                raise ConfigError(
                    f"--ckpt.load_enable: {folder} was written with {flag} {there}, and this run has {here}: resume "
                    "with the same, or start anew without the flag."
                )
        if self._critic_store is not None:
            critic = self._critic_store.root / folder.name
            self._models.critic.call("load_checkpoint", str(critic), timeout=self._timeout)
        self._controller.load_state_dict(state["controller"])
        self._best.load_state_dict(state["best"])
        self._console.note(f"resuming after step {self._controller.position.step} from {folder}")

    def before_training(self) -> None:
        """Evaluates the model that training starts from; a resumed run has done so."""
        if self._controller.position.step == 0:
            self._record_evaluation(0, self._controller.evaluate())

    def _record_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        if not metrics:
            return
        with _naming_the_disk(f"writing the evaluation of step {step}"):
            self._trackers.log(step, metrics)
        self._console.note(f"evaluation after step {step}: {evaluation_line(metrics)}")
        self._keep_best(step, metrics)

    def _keep_best(self, step: int, metrics: dict[str, float]) -> None:
        if self._best.improves(step, metrics):
            with _naming_the_disk(f"writing the best model, of step {step}"):
                self._export(self._best.folder)
                self._best.write()

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
        if any(name.startswith("eval/") for name in metrics.values):
            self._console.note(f"evaluation after step {step}: {evaluation_line(metrics.values)}")
            self._keep_best(step, metrics.values)
        every = self._ckpt.save_steps
        if every > 0 and step % every == 0:
            self._checkpoint(step)

    def finish(self) -> None:
        """Exports the policy, with what was asked for beside it, and writes the report."""
        step = self._controller.position.step
        if step and not self._controller.evaluated:
            self._record_evaluation(step, self._controller.evaluate())
        with _naming_the_disk(f"writing the results to {self._folder}"):
            self._export(self._folder)
            if self._settings.save_ema:
                self._export(Path(f"{self._folder}_ema"), ema=True)
            if self._settings.save_critic and self._models.critic is not None:
                self._export_model(self._models.critic, Path(f"{self._folder}_critic"))
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
            if self._critic_store is not None:
                self._critic_store.prune()

    def _save_state(self, folder: Path) -> None:
        state = {
            "controller": self._controller.state_dict(),
            "best": self._best.state_dict(),
            "fixed": self._settings.fixed,
        }
        if self._critic_store is not None:
            # Before the actor's, whose state is what a resumed run looks for.
            critic = self._critic_store.root / folder.name
            self._critic_store.sweep()
            self._models.critic.call("save_checkpoint", str(critic), {}, timeout=self._timeout)
        self._models.actor.call("save_checkpoint", str(folder), state, timeout=self._timeout)
        (folder / CONFIG_FILE).write_text(self._settings.config_yaml)

    def _export(self, folder: Path, *, ema: bool = False) -> None:
        self._export_model(self._models.actor, folder, ema)

    def _export_model(self, group: WorkerGroup, folder: Path, ema: bool = False) -> None:
        group.call("save_hf", str(folder), ema, timeout=self._timeout)
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


def evaluation_line(metrics: Mapping[str, float]) -> str:
    """Returns: the metrics of an evaluation in one line."""
    return "  ".join(
        f"{name.removeprefix('eval/')} {value:.4g}" for name, value in metrics.items() if name.startswith("eval/")
    )
