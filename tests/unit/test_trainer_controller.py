"""How an RL loop ends with its data, and what of it a checkpoint holds."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from openrlhf.config import AlgoConfig, KLConfig
from openrlhf.data.trajectory import Segment, Trajectory
from openrlhf.tracking.progress import Console
from openrlhf.trainer.controller import LoopSettings, Models, Position, RLController
from openrlhf.trainer.device_meter import Usage
from openrlhf.trainer.experience import Budget, RewardShaping, build_experience
from openrlhf.trainer.flops import ModelFlops
from openrlhf.trainer.rl_metrics import StepMetrics
from openrlhf.trainer.sampling import Collected
from openrlhf.trainer.scoring import RewardScorer
from openrlhf.trainer.turns import DeviceTurns
from openrlhf.utils.errors import RunError


class ScriptedCollector:
    """Gives what a script says, and then says that the data has ended."""

    def __init__(self, *rollouts: Collected) -> None:
        self.left = list(rollouts)

    def collect(self) -> Collected | None:
        return self.left.pop(0) if self.left else None

    def state_dict(self) -> dict[str, Any]:
        return {"left": len(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = self.left[-state["left"] :]


def failed(group: int) -> Trajectory:
    return Trajectory(group, 0, "p", None, [], failure="the judge is down")


def nobody_sleeps() -> DeviceTurns:
    parts: Any = {"pool": None, "send": None, "trained": [], "others": []}
    return DeviceTurns(**parts, engines_sleep=False, training_sleeps=False, engine_share=1.0, timeout=1.0)


def controller_of(
    *rollouts: Collected, kl: KLConfig | None = None, evaluator: Any = None
) -> tuple[RLController, io.StringIO]:
    """A controller without workers: whatever reaches them is an error."""
    said = io.StringIO()
    scorer = RewardScorer([], None, combine="sum", budget=Budget(1, None), max_len=8, timeout=1.0)
    algo = AlgoConfig(kl=kl or KLConfig(), dynamic_filtering_enable=True)
    loop = LoopSettings(algo, RewardShaping((-10.0, 10.0)), 1.0, Budget(1, None), 0, 1.0)
    workers: Any = dict.fromkeys(("models", "updater")) | {"evaluator": evaluator, "turns": nobody_sleeps()}
    collector: Any = ScriptedCollector(*rollouts)
    return RLController(loop, collector=collector, scorer=scorer, console=Console(1, said), **workers), said


def test_data_that_has_ended_ends_the_run_without_a_step_and_without_a_word() -> None:
    controller, said = controller_of()
    assert controller.run_step() is None and controller.position == Position(kl_coef=0.01)
    assert said.getvalue() == ""


def test_a_last_rollout_of_which_nothing_passed_ends_the_run_and_says_so() -> None:
    controller, said = controller_of(Collected(dropped=[failed(0), failed(1)]))
    assert controller.run_step() is None and controller.position.step == 0
    assert "none of the last 2 samples lay in a group that --algo.dynamic_filtering_range lets pass" in said.getvalue()


def test_a_rollout_that_came_is_not_thrown_away_because_the_data_ends_with_it() -> None:
    # It is asked for its rewards before anybody asks for the next one.
    controller, _ = controller_of(Collected(trajectories=[failed(0)], dropped=[failed(1)]))
    with pytest.raises(RunError, match="none of the 1 samples of step 1 can be trained on; no weight was moved"):
        controller.run_step()


def test_a_checkpoint_holds_the_place_in_the_data_and_the_coefficient_of_the_kl() -> None:
    rollouts = [Collected(), Collected(), Collected()]
    first, _ = controller_of(*rollouts, kl=KLConfig(init_coef=0.1, target=1.0))
    first.position = Position(step=3, updates=11, kl_coef=0.25)
    first._collector.collect()
    state = json.loads(json.dumps(first.state_dict()))
    first.position.step += 1
    second, _ = controller_of(*rollouts, kl=KLConfig(init_coef=0.1, target=1.0))
    second.load_state_dict(state)
    assert second.position == Position(step=3, updates=11, kl_coef=0.25)
    assert second.state_dict() == state


def test_a_coefficient_that_does_not_adapt_is_what_the_flag_of_the_resumed_run_says() -> None:
    first, _ = controller_of(Collected(), kl=KLConfig(init_coef=0.1, target=1.0))
    first.position = Position(step=3, updates=11, kl_coef=0.25)
    second, _ = controller_of(Collected(), kl=KLConfig(init_coef=0.02))
    second.load_state_dict(first.state_dict())
    assert second.position == Position(step=3, updates=11, kl_coef=0.02)


def test_a_run_that_goes_on_from_an_evaluated_step_knows_that_it_was_evaluated() -> None:
    class ScriptedEvaluator:
        def run(self) -> dict[str, float]:
            return {"eval/default_pass1": 0.5}

    first, _ = controller_of(Collected(), evaluator=ScriptedEvaluator())
    first.position.step = 4
    before = first.state_dict()
    assert not first.evaluated and first.evaluate() and first.evaluated
    for state, evaluated in ((before, False), (first.state_dict(), True)):
        second, _ = controller_of(Collected(), evaluator=ScriptedEvaluator())
        second.load_state_dict(state)
        assert second.evaluated is evaluated


def test_a_trained_run_passes_over_two_steps_in_a_row_without_a_sample_and_stops_at_the_third() -> None:
    controller, said = controller_of(*[Collected(trajectories=[failed(step)]) for step in range(3)])
    controller.position.updates = 5
    for step in (1, 2):
        metrics = controller.run_step()
        assert metrics is not None and metrics.values["reward/failed"] == 1 and "actor/updates" not in metrics.values
        assert controller.position.step == step and controller.position.updates == 5
        assert f"samples of step {step} can be trained on; no weight was moved; 1 of them: the judge" in said.getvalue()
    with pytest.raises(RunError, match="of step 3 can be trained on"):
        controller.run_step()


class ScoringGroup:
    """Counts what it is asked for, and what it is asked with."""

    size = 1

    def __init__(self, value: float) -> None:
        self.value = value
        self.asked: list[set[str]] = []

    def logprobs(
        self, batch: Any, dealt: Any, temperature: float, timeout: float, *, adapters: bool = True
    ) -> torch.Tensor:
        self.asked.append(set(batch.token_fields))
        return torch.full((batch.tokens.numel(),), self.value if adapters else self.value - 1)


@pytest.mark.parametrize(("samples", "passes"), [(2, 0), (3, 1)])
def test_the_policy_is_asked_for_old_log_probs_only_where_one_update_does_not_give_them(
    samples: int, passes: int
) -> None:
    controller, _ = controller_of()
    controller._settings = replace(controller._settings, on_policy_samples=2)
    actor, ref = ScoringGroup(-1.0), ScoringGroup(-2.0)
    controller._models = Models(actor, ref)  # type: ignore[arg-type]
    rows = [Trajectory(0, n, "p", None, [Segment([1, 2, 3], [(1, 3)])], reward=1.0) for n in range(samples)]
    experience = build_experience(rows)
    controller._add_scores(experience)
    assert len(actor.asked) == passes and len(ref.asked) == 1
    fields = experience.batch.token_fields
    assert ("old_logprobs" in fields) == bool(passes) and fields["ref_logprobs"].eq(-2.0).all()


def test_the_actor_answers_for_the_reference_with_its_adapters_off() -> None:
    controller, _ = controller_of()
    actor = ScoringGroup(-1.0)
    controller._models = Models(actor, reference_below_adapters=True)  # type: ignore[arg-type]
    experience = build_experience([Trajectory(0, 0, "p", None, [Segment([1, 2, 3], [(1, 3)])], reward=1.0)])
    controller._add_scores(experience)
    fields = experience.batch.token_fields
    assert fields["old_logprobs"].eq(-1.0).all() and fields["ref_logprobs"].eq(-2.0).all()
    assert len(actor.asked) == 2 and controller._models.groups == [actor]


class MeasuredGroup:
    """Two ranks that say what they used."""

    def __init__(self, role: str, device: str, *ranks: Usage) -> None:
        self.role, self.device, self.ranks = role, device, ranks

    def call(self, method: str, *, timeout: float) -> list[Usage]:
        assert method == "usage" and self.device == "cuda", "nobody asks a CPU"
        return list(self.ranks)


def test_gpus_are_asked_for_their_memory_and_speed_after_a_step_and_cpus_are_not() -> None:
    usage = (Usage(3.0, 2.0, ModelFlops(60.0, ()), 100.0), Usage(4.0, 1.0, ModelFlops(60.0, ()), 100.0))
    groups: Any = MeasuredGroup("actor", "cuda", *usage), MeasuredGroup("ref", "cpu"), MeasuredGroup("critic", "cpu")
    controller, _ = controller_of()
    controller._settings = replace(controller._settings, epochs=2)
    controller._models = Models(*groups)
    metrics = StepMetrics()
    rows = [Trajectory(0, n, "p", None, [Segment([1, 2, 3], [(1, 3)])], reward=1.0) for n in range(2)]
    controller._measure(build_experience(rows), metrics)
    assert metrics.values == {"memory/actor_gib": 4.0, "throughput/mfu": pytest.approx(2 * 60 * 6 / (2 * 200))}
