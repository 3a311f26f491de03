"""What an RL run leaves behind: metrics, rollouts, checkpoints, the exported model, the report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from openrlhf.backends.checkpoints import CheckpointStore
from openrlhf.config import PPOConfig
from openrlhf.data.trajectory import Trajectory
from openrlhf.tracking.metrics import build_trackers
from openrlhf.tracking.progress import Console
from openrlhf.tracking.report import write_report
from openrlhf.tracking.rollouts import RolloutRecord, RolloutWriter
from openrlhf.trainer.controller import Position, RLController
from openrlhf.trainer.rl_metrics import StepMetrics
from openrlhf.trainer.workers import WorkerGroup

CONFIG_FILE = "config.yaml"


class RLOutputs:
    """Writes after each step and at the end; every file is whole at any moment."""

    def __init__(
        self,
        config: PPOConfig,
        controller: RLController,
        actor: WorkerGroup,
        tokenizer: Any,
        console: Console,
        config_yaml: str,
    ) -> None:
        self._config = config
        self._controller = controller
        self._actor = actor
        self._tokenizer = tokenizer
        self._console = console
        self._yaml = config_yaml
        self._folder = Path(config.ckpt.output_dir)
        self._timeout = config.train.step_timeout
        self._store = CheckpointStore(
            Path(config.ckpt.path) / "_actor", max_num=config.ckpt.max_num, max_mem_gb=config.ckpt.max_mem
        )

    def resume(self) -> None:
        """Goes on from the newest checkpoint where that is asked for, and opens the run's files."""
        step = 0
        latest = self._store.latest() if self._config.ckpt.load_enable else None
        if latest is not None:
            state = self._actor.call("load_checkpoint", str(latest), timeout=self._timeout)[0]
            self._controller.sampler.load_state_dict(state["sampler"])
            self._controller.position = Position(**state["position"])
            step = self._controller.position.step
            self._console.note(f"resuming after step {step} from {latest}")
        elif self._config.ckpt.load_enable:
            self._console.note(f"--ckpt.load_enable: no checkpoint under {self._config.ckpt.path}, starting anew")
        self._console.begin(step)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / CONFIG_FILE).write_text(self._yaml)
        self._trackers = build_trackers(
            self._config.logger,
            self._folder,
            run_name=self._config.logger.wandb.run_name or "train_ppo_ray",
            run_config={"flags": self._yaml},
            resume_step=step,
            warn=self._console.warn,
        )
        self._rollouts = RolloutWriter(self._folder, resume_step=step)

    def after_step(self, metrics: StepMetrics) -> None:
        """Records a step and, where it is due, writes a checkpoint."""
        step = self._controller.position.step
        self._trackers.log(step, metrics.values)
        self._rollouts.write(step, self._records(metrics.trajectories))
        self._console.step(step, metrics.values)
        every = self._config.ckpt.save_steps
        if every > 0 and step % every == 0:
            self._checkpoint(step)

    def finish(self) -> None:
        """Exports the policy and writes the report."""
        self._export(self._folder)
        self._trackers.close()
        report = write_report(self._folder, "Reinforcement learning")
        self._console.note(f"model, metrics and rollouts: {self._folder}; report: {report}")

    def close(self) -> None:
        """Flushes what is open, also after a failure."""
        for open_file in (self.__dict__.get("_trackers"), self.__dict__.get("_rollouts")):
            if open_file is not None:
                open_file.close()

    def _checkpoint(self, step: int) -> None:
        ckpt = self._config.ckpt
        if not ckpt.disable_ds:
            folder = self._store.folder(step)
            state = {
                "position": asdict(self._controller.position),
                "sampler": self._controller.sampler.state_dict(),
            }
            self._actor.call("save_checkpoint", str(folder), state, timeout=self._timeout)
            (folder / CONFIG_FILE).write_text(self._yaml)
            self._store.prune()
        if ckpt.save_hf:
            self._export(Path(ckpt.path) / f"global_step{step}_hf")

    def _export(self, folder: Path) -> None:
        self._actor.call("save_hf", str(folder), timeout=self._timeout)
        self._tokenizer.save_pretrained(folder)

    def _records(self, trajectories: list[Trajectory]) -> list[RolloutRecord]:
        count = self._config.rollout.save_samples
        return [self._record(trajectory) for trajectory in trajectories[:count]]

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
