"""What an RL run writes of its steps and evaluations, and what is left of it after a failure."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openrlhf.config import ConfigError, LoggerConfig, PPOCkptConfig
from openrlhf.tracking.jsonl import read_jsonl
from openrlhf.tracking.progress import Console
from openrlhf.trainer.best import BestModel
from openrlhf.trainer.controller import Models
from openrlhf.trainer.rl_metrics import StepMetrics
from openrlhf.trainer.rl_outputs import OutputSettings, RLOutputs
from openrlhf.utils.errors import RunError
from tests.tiny_models import make_tokenizer
from tests.unit.test_trainer_controller import controller_of

EVALUATION = {"eval/default_pass1": 0.5}


class ScriptedRanks:
    """Ranks that hold no weights: they keep what they are given to save, and give it back."""

    def __init__(self) -> None:
        self.states: dict[str, dict[str, Any]] = {}

    def call(self, method: str, folder: str, *args: Any, timeout: float) -> list[Any]:
        if method == "load_checkpoint":
            return [self.states[folder]]
        Path(folder).mkdir(parents=True, exist_ok=True)
        if method == "save_checkpoint":
            (Path(folder) / "complete").touch()
            self.states[folder] = args[0]
        return [None]


class ScriptedEvaluator:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.runs = 0
        self.found = EVALUATION

    def run(self) -> dict[str, float]:
        self.runs += 1
        return dict(self.found)


class Room:
    """One run after another in the same folders, each with a controller of its own."""

    def __init__(self, folder: Path, *, logging_steps: int = 1, **ckpt: Any) -> None:
        flags = PPOCkptConfig(output_dir=str(folder / "out"), path=str(folder / "states"), **ckpt)
        self.settings = OutputSettings(flags, LoggerConfig(logging_steps=logging_steps), 1, 9.0, {"--x": 1}, "x: 1\n")
        self.actor: Any = ScriptedRanks()
        self.critic: Any = None
        self.folder = folder
        self.begin()

    def begin(self, **ckpt: Any) -> None:
        self.settings = replace(self.settings, ckpt=replace(self.settings.ckpt, **ckpt))
        self.evaluator = ScriptedEvaluator()
        self.controller, _ = controller_of(evaluator=self.evaluator)
        self.said = io.StringIO()
        self.outputs = RLOutputs(
            self.settings,
            self.controller,
            Models(self.actor, critic=self.critic),
            make_tokenizer(),
            Console(9, self.said),
        )

    def step(self, *, evaluate: bool = False, value: float | None = None) -> None:
        self.controller.position.step += 1
        if value is not None:
            self.evaluator.found, evaluate = {"eval/default_pass1": value}, True
        found = self.controller.evaluate() if evaluate else {}
        self.outputs.after_step(StepMetrics({"reward/mean": float(self.controller.position.step), **found}))

    def lines(self) -> list[tuple[int, float | None, float | None]]:
        return [
            (line["step"], line.get("reward/mean"), line.get("eval/default_pass1"))
            for line in read_jsonl(self.folder / "out" / "metrics.jsonl")
        ]


def test_evaluations_and_the_last_step_are_logged_whatever_the_rhythm_of_the_log_is(tmp_path: Path) -> None:
    room = Room(tmp_path, logging_steps=2)
    room.outputs.resume()
    room.outputs.before_training()
    for step in range(1, 6):
        room.step(evaluate=step == 3)
    room.outputs.finish()
    assert room.lines() == [(0, None, 0.5), (2, 2.0, None), (3, 3.0, 0.5), (4, 4.0, None), (5, 5.0, 0.5)]
    printed = [int(line.split()[1].split("/")[0]) for line in room.said.getvalue().splitlines() if "step " in line[:5]]
    assert printed == [2, 3, 4]


@pytest.mark.parametrize("evaluated", [True, False], ids=["in its last step", "at its end"])
def test_a_run_that_goes_on_after_its_last_step_does_not_evaluate_it_again(tmp_path: Path, evaluated: bool) -> None:
    room = Room(tmp_path, save_steps=1, max_num=9)
    room.outputs.resume()
    for step in (1, 2):
        room.step(evaluate=evaluated and step == 2)
    room.outputs.finish()
    lines = room.lines()
    assert room.evaluator.runs == 1
    room.begin(load_enable=True)
    room.outputs.resume()
    room.outputs.before_training()
    room.outputs.finish()
    assert "resuming after step 2" in room.said.getvalue()
    assert room.evaluator.runs == 0 and room.lines() == lines


def test_a_run_that_goes_on_removes_the_states_after_its_own_with_its_first_save(tmp_path: Path) -> None:
    room = Room(tmp_path, save_steps=1, max_num=2)
    room.outputs.resume()
    for _ in range(3):
        room.step()
    room.outputs.close()
    actor = tmp_path / "states" / "_actor"
    (actor / "global_step3" / "complete").unlink()
    later = actor / "global_step9"
    later.mkdir()
    room.begin(load_enable=True)
    room.outputs.resume()
    assert room.controller.position.step == 2
    (later / "complete").touch()
    room.step()
    room.step()
    assert sorted(path.name for path in actor.glob("global_step*")) == ["global_step3", "global_step4"]


@pytest.mark.parametrize(("key", "kept"), [("", [2, 4, 5]), ("eval_default_pass1", [2, 4, 5]), ("none", [3, 4, 5])])
def test_the_states_of_the_best_evaluation_outlive_their_turn_and_a_resumed_run_knows_them(
    tmp_path: Path, key: str, kept: list[int]
) -> None:
    room = Room(tmp_path, save_steps=1, max_num=3, best_metric_key=key)
    room.critic = ScriptedRanks()
    room.begin()
    room.outputs.resume()
    for value in (0.1, 0.7, 0.4):
        room.step(value=value)
    room.outputs.close()
    room.begin(load_enable=True)
    room.outputs.resume()
    for value in (0.6, 0.3):
        room.step(value=value)
    for role in ("_actor", "_critic"):
        found = (tmp_path / "states" / role).glob("global_step*")
        assert sorted(path.name for path in found) == [f"global_step{step}" for step in kept]
    room.step(value=0.9)
    room.step(value=0.2)
    assert room.outputs._states.actor.folder(6).is_dir() and not room.outputs._states.actor.folder(2).is_dir()


def test_a_resumed_run_that_is_asked_for_another_metric_starts_its_search_for_the_best_anew(tmp_path: Path) -> None:
    best = BestModel("", tmp_path)
    assert best.improves(1, {"eval/sums_pass1": 0.9, "eval/sums_reward": 0.1})
    state = best.state_dict()

    same = BestModel("eval_sums_pass1", tmp_path)
    assert same.load_state_dict(state) is None
    assert not same.improves(2, {"eval/sums_pass1": 0.8, "eval/sums_reward": 0.2})

    other = BestModel("eval/sums_reward", tmp_path)
    assert other.load_state_dict(state) == (
        "--ckpt.best_metric_key eval/sums_reward: the best model so far is that of eval/sums_pass1, which counts no "
        "longer"
    )
    assert other.improves(2, {"eval/sums_pass1": 0.8, "eval/sums_reward": 0.2})

    none = BestModel("none", tmp_path)
    assert none.load_state_dict(state) is not None and not none.improves(2, {"eval/sums_pass1": 1.0})

    missing = BestModel("eval/typo", tmp_path)
    missing.load_state_dict(state)
    with pytest.raises(ConfigError, match="--ckpt.best_metric_key eval/typo: the evaluation has no such metric"):
        missing.improves(2, {"eval/sums_pass1": 1.0})


@pytest.fixture
def full_disk(tmp_path: Path) -> Room:
    """A run whose metrics and rollouts stand on a disk that takes no byte."""
    room = Room(tmp_path, logging_steps=9)
    (tmp_path / "out").mkdir()
    for name in ("metrics", "rollouts"):
        (tmp_path / "out" / f"{name}.jsonl").symlink_to("/dev/full")
    room.outputs.resume()
    room.step()
    return room


def test_files_that_cannot_be_closed_are_warnings_after_a_failure_and_each_gets_its_turn(full_disk: Room) -> None:
    rollouts = full_disk.outputs._rollouts
    with pytest.raises(ZeroDivisionError):
        try:
            raise ZeroDivisionError
        finally:
            full_disk.outputs.close()
    assert "warning: the last metrics or rollouts are lost: [Errno 28] No space left" in full_disk.said.getvalue()
    assert rollouts._file._file.closed
    full_disk.outputs.close()
    assert full_disk.said.getvalue().count("warning") == 1


def test_metrics_that_a_finished_run_cannot_write_are_its_error(full_disk: Room) -> None:
    full_disk.evaluator.run = dict
    with pytest.raises(RunError, match="writing the results to .*No space left"):
        full_disk.outputs.finish()
