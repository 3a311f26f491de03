"""What an RL run leaves behind: metrics, rollouts, checkpoints, the exported model, the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf.config import LoggerConfig, PPOCkptConfig
from openrlhf.data.trajectory import Trajectory
from openrlhf.models.tokenizer_files import save_tokenizer
from openrlhf.tracking.metrics import MultiTracker, build_trackers
from openrlhf.tracking.progress import Console
from openrlhf.tracking.report import report_what_there_is, write_report
from openrlhf.tracking.rollouts import RolloutRecord, RolloutWriter
from openrlhf.trainer.best import BestModel
from openrlhf.trainer.controller import Models, RLController
from openrlhf.trainer.fixed_settings import refuse_other_settings, write_fixed
from openrlhf.trainer.rl_metrics import StepMetrics
from openrlhf.trainer.rl_states import RLStates, was_evaluated
from openrlhf.trainer.workers import WorkerGroup
from openrlhf.utils.errors import RunError

CONFIG_FILE = "config.yaml"
TITLE = "Reinforcement learning"


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
        fixed: what a resumed run must share with the one it goes on from, by flag, since order, seeds, schedule and
            the optimizer's state follow from it; plain JSON values.
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
        self._states = RLStates(settings.ckpt, has_critic=models.critic is not None)
        self._best = BestModel(settings.ckpt.best_metric_key, Path(settings.ckpt.path) / "best_hf")
        self._trackers: MultiTracker | None = None
        self._rollouts: RolloutWriter | None = None

    def resume(self) -> None:
        """Goes on from the newest checkpoint where that is asked for, and opens the run's files.

        Raises: ConfigError, where the checkpoint belongs to a run with other settings.
        """
        latest = self._states.to_resume()
        if latest is not None:
            self._load(latest)
        elif self._ckpt.load_enable:
            self._console.note(f"--ckpt.load_enable: no checkpoint under {self._ckpt.path}, starting anew")
        step = self._controller.position.step
        self._states.go_on_after(step)
        self._console.begin(step)
        with _naming_the_disk(f"opening the run's files in {self._folder}"):
            self._open(step)

    def _open(self, step: int) -> None:
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
        state = self._models.actor.call("load_checkpoint", str(folder), timeout=self._timeout)[0]
        refuse_other_settings(folder, state["fixed"], self._settings.fixed)
        if self._models.critic is not None:
            critic = self._states.critic_of(folder)
            self._models.critic.call("load_checkpoint", str(critic), timeout=self._timeout)
        if was_evaluated(folder):
            state["controller"]["evaluated_at"] = state["controller"]["position"]["step"]
        self._controller.load_state_dict(state["controller"])
        note = self._best.load_state_dict(state["best"])
        if note is not None:
            self._console.note(note)
        self._console.note(f"resuming after step {self._controller.position.step} from {folder}")

    def before_training(self) -> None:
        """Evaluates the model that training starts from; a resumed run has done so."""
        if self._controller.position.step == 0:
            self._record_evaluation(0, self._controller.evaluate())
        # What came before the first step is no part of the time that a step takes.
        self._console.begin(self._controller.position.step)

    def _record_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        if not metrics:
            return
        with _naming_the_disk(f"writing the evaluation of step {step}"):
            self._trackers.log(step, metrics, always=True)
        self._console.note(f"evaluation after step {step}: {evaluation_line(metrics)}")
        self._keep_best(step, metrics)

    def _keep_best(self, step: int, metrics: dict[str, float]) -> None:
        if self._best.improves(step, metrics):
            with _naming_the_disk(f"writing the best model, of step {step}"):
                self._best.forget()
                self._export(self._best.folder)
                self._best.write()

    def after_step(self, metrics: StepMetrics) -> None:
        """Records a step and, where it is due, writes a checkpoint."""
        step = self._controller.position.step
        if self._trackers is None or self._rollouts is None:
            raise RuntimeError("resume() opens the files, and comes before the first step")
        evaluated = any(name.startswith("eval/") for name in metrics.values)
        with _naming_the_disk(f"writing the metrics of step {step}"):
            self._trackers.log(step, metrics.values, always=evaluated)
            self._rollouts.write(step, [self._record(sample) for sample in self._shown(metrics.trajectories)])
        if evaluated or step % self._settings.logger.logging_steps == 0:
            self._console.step(step, metrics.values)
        self._console.estimate(step)
        if evaluated:
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
            with _naming_the_disk(f"writing the state of step {step}"):
                self._states.mark_evaluated(step)
        with _naming_the_disk(f"writing the results to {self._folder}"):
            self._export(self._folder)
            if self._settings.save_ema:
                self._export(Path(f"{self._folder}_ema"), ema=True)
            if self._settings.save_critic and self._models.critic is not None:
                self._export_model(self._models.critic, Path(f"{self._folder}_critic"))
            problems = self._close_files()
            if problems:
                raise problems[0]
            report = write_report(self._folder, TITLE)
        self._console.note(f"model, metrics and rollouts: {self._folder}; report: {report}")

    def close(self) -> None:
        """After a failure, flushes what is open and writes the report of what there is; a second failure is a warning,
        and does not hide the first.
        """
        unfinished = self._trackers is not None
        for problem in self._close_files():
            self._console.warn(f"the last metrics or rollouts are lost: {problem}")
        if unfinished:
            try:
                report_what_there_is(self._folder, TITLE)
            except (OSError, ValueError) as error:
                self._console.warn(f"there is no report: {error}")

    def _close_files(self) -> list[OSError]:
        problems = []
        for open_file in (self._trackers, self._rollouts):
            try:
                if open_file is not None:
                    open_file.close()
            except OSError as error:
                problems.append(error)
        self._trackers, self._rollouts = None, None
        return problems

    def _checkpoint(self, step: int) -> None:
        with _naming_the_disk(f"writing the checkpoint of step {step}"):
            self._states.sweep()
            keep = self._best.checkpoint_to_keep(step)
            if not self._ckpt.disable_ds:
                self._save_state(self._states.actor.folder(step))
            if self._ckpt.save_hf:
                self._export(self._states.actor.export_folder(step))
            self._states.prune(keep=keep)

    def _save_state(self, folder: Path) -> None:
        self._controller.hold_models()
        state = {
            "controller": self._controller.state_dict(),
            "best": self._best.state_dict(),
            "fixed": self._settings.fixed,
        }
        if self._models.critic is not None:
            # Before the actor's, whose state is what a resumed run looks for.
            critic = self._states.critic_of(folder)
            self._models.critic.call("save_checkpoint", str(critic), {}, timeout=self._timeout)
        self._models.actor.call("save_checkpoint", str(folder), state, timeout=self._timeout)
        write_fixed(folder, self._settings.fixed)
        (folder / CONFIG_FILE).write_text(self._settings.config_yaml)

    def _export(self, folder: Path, *, ema: bool = False) -> None:
        self._export_model(self._models.actor, folder, ema)

    def _export_model(self, group: WorkerGroup, folder: Path, ema: bool = False) -> None:
        # The model's config.json is written last: with it an export counts as whole.
        folder.mkdir(parents=True, exist_ok=True)
        save_tokenizer(self._tokenizer, folder)
        (folder / CONFIG_FILE).write_text(self._settings.config_yaml)
        self._controller.hold_models()
        group.call("save_hf", str(folder), ema, timeout=self._timeout)

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
