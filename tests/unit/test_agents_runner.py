"""From the dict of an executor to a trajectory: what is checked, and how a sample fails without taking others along."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import numpy as np
import pytest
import torch

from openrlhf.agents import runner
from openrlhf.agents.base import TemplatedText
from openrlhf.agents.reward import RewardResult
from openrlhf.agents.runner import _describe, run_sample
from openrlhf.agents.single_turn import SingleTurnAgentExecutor
from openrlhf.data.prompts import PromptRecord
from openrlhf.data.trajectory import Trajectory
from openrlhf.utils.agent import AgentExecutorBase
from tests.scripted_engine import FixedReward, Params, ScriptedEngine, completion
from tests.tiny_models import END_ID, make_tokenizer

GOOD = {
    "observation_tokens": [9, 1, 2, 4],
    "action_ranges": [(1, 4)],
    "rollout_log_probs": [0.0, -0.1, -0.2, -0.3],
    "reward": 0.5,
}


class Returning(AgentExecutorBase):
    """Returns, raises or does what it was given."""

    def __init__(self, outcome: Any) -> None:
        self._outcome = outcome

    async def execute(self, **arguments: Any) -> Any:
        outcome = self._outcome(arguments) if callable(self._outcome) else self._outcome
        if isinstance(outcome, Exception):
            raise outcome
        return await outcome if asyncio.iscoroutine(outcome) else outcome


def run(executor: Any, engine: Any = None, timeout: float = 30.0, **fields: Any) -> Trajectory:
    record = PromptRecord(**{"prompt": "1 + 2 =", "label": 3, "datasource": "sums", "templated": False, **fields})
    return asyncio.run(
        run_sample(
            executor,
            record,
            group_id=7,
            sample_id=2,
            sampling_params=Params(max_tokens=8),
            max_length=64,
            tokenizer=make_tokenizer(),
            engine=engine or ScriptedEngine(weight_version=5),
            timeout=timeout,
        )
    )


def test_a_sample_becomes_a_trajectory_with_everything_that_is_known_of_it() -> None:
    engine = ScriptedEngine(completion([5, END_ID], [-0.5, -0.25], "length"), weight_version=5)
    reward = FixedReward(RewardResult(reward=1.5, score=0.0, extra_logs={"right": 1.0}))
    trajectory = run(SingleTurnAgentExecutor(reward), engine)
    prompt = make_tokenizer()("1 + 2 =")["input_ids"]
    (segment,) = trajectory.segments
    assert segment.tokens == [*prompt, 5, END_ID]
    assert segment.logprobs == [0.0] * len(prompt) + [-0.5, -0.25]
    assert segment.weight_versions == [5]
    assert segment.stop_reason == "length"
    assert (trajectory.group_id, trajectory.sample_id) == (7, 2)
    assert (trajectory.prompt, trajectory.label, trajectory.datasource) == ("1 + 2 =", 3, "sums")
    assert (trajectory.reward, trajectory.score, trajectory.failure) == (1.5, 0.0, None)
    assert trajectory.truncated
    assert trajectory.response_length == 2
    assert trajectory.extra_logs == {"right": 1.0}


def test_the_executor_learns_whether_a_template_wrote_the_prompt() -> None:
    seen = []
    for templated in (False, True):
        run(Returning(lambda arguments: seen.append(type(arguments["prompt"])) or GOOD), templated=templated)
    assert seen == [str, TemplatedText]


def test_changing_the_sampling_parameters_does_not_reach_other_samples() -> None:
    params = Params(max_tokens=8, stop=["a"])

    def change(arguments: dict[str, Any]) -> dict[str, Any]:
        arguments["sampling_params"].stop.append("b")
        arguments["sampling_params"].temperature = 0.0
        return GOOD

    record = PromptRecord(prompt="x", label=None, datasource="d", templated=False)
    arguments = {"max_length": 64, "tokenizer": None, "engine": ScriptedEngine(), "timeout": 5.0}
    asyncio.run(run_sample(Returning(change), record, group_id=0, sample_id=0, sampling_params=params, **arguments))
    assert params == Params(max_tokens=8, stop=["a"])


@pytest.mark.parametrize("reward", [0.5, torch.tensor(0.5), torch.tensor([0.5]), np.float32(0.5)])
def test_numbers_may_come_as_tensors_and_arrays(reward: Any) -> None:
    arrays = {"observation_tokens": torch.tensor([9, 1, 2, 4]), "rollout_log_probs": np.array([0.0, -1, -1, -1])}
    trajectory = run(Returning({**GOOD, **arrays, "reward": reward, "extra_logs": {"a": torch.tensor([2.0])}}))
    assert trajectory.failure is None
    assert trajectory.reward == 0.5
    assert trajectory.score == 0.5
    assert trajectory.segments[0].tokens == [9, 1, 2, 4]
    assert trajectory.extra_logs == {"a": 2.0}


@pytest.mark.parametrize("cut", [True, np.bool_(True), torch.tensor([True]), 1])
def test_truncated_may_be_any_kind_of_truth(cut: Any) -> None:
    assert run(Returning({**GOOD, "truncated": cut})).truncated is True
    assert run(Returning({**GOOD, "truncated": None})).truncated is False


def test_the_rounding_of_a_certain_token_is_no_fault_of_its_log_prob() -> None:
    trajectory = run(Returning({**GOOD, "rollout_log_probs": [0.0, 1e-4, 0.0, -0.3]}))
    assert trajectory.failure is None


def test_values_outside_the_action_ranges_are_no_log_probs() -> None:
    trajectory = run(Returning({**GOOD, "rollout_log_probs": [float("nan"), -0.1, -0.2, -0.3]}))
    assert trajectory.segments[0].logprobs == [0.0, -0.1, -0.2, -0.3]


def test_segments_share_the_reward() -> None:
    records = [
        {"observation_tokens": [9, 1], "action_ranges": [(1, 2)]},
        {"observation_tokens": [9, 3, 4], "action_ranges": [(1, 3)], "rollout_log_probs": [0.0, -1.0, -2.0]},
    ]
    trajectory = run(Returning({"segments": records, "reward": 1}))
    assert [segment.tokens for segment in trajectory.segments] == [[9, 1], [9, 3, 4]]
    assert [segment.logprobs for segment in trajectory.segments] == [None, [0.0, -1.0, -2.0]]
    assert trajectory.reward == 1.0
    assert trajectory.response_length == 3


BROKEN: list[tuple[Any, str]] = [
    ({**GOOD, "truncated": "False"}, "'truncated' is 'False', neither True nor False"),
    ({**GOOD, "rollout_log_probs": [0.0, -0.1, 0.4, -0.3]}, "'rollout_log_probs' holds 0.4, and the logarithm"),
    ({**GOOD, "extra_logs": {"a\nb": 1}}, r"'extra_logs' has the key 'a\\nb'"),
    (None, "returned NoneType, not a dict"),
    ({"reward": 1.0}, "needs 'observation_tokens' and 'action_ranges'"),
    ({**GOOD, "observation_tokens": "abc"}, "'observation_tokens' is str"),
    ({**GOOD, "observation_tokens": [9, 1.5, 2, 4]}, "1.5, not an integer"),
    ({**GOOD, "observation_tokens": [9, -1, 2, 4]}, "-1, which is no token id"),
    ({**GOOD, "action_ranges": [(1, 5)]}, r"action range \(1, 5\)"),
    ({**GOOD, "action_ranges": [(1, 3), (2, 4)]}, r"action range \(2, 4\)"),
    ({**GOOD, "action_ranges": [(0, 4)]}, "first token"),
    ({**GOOD, "action_ranges": [1, 4]}, r"1, not \(start, end\)"),
    ({**GOOD, "action_ranges": []}, "no token that the policy sampled"),
    ({**GOOD, "action_ranges": [(2, 2)]}, "no token that the policy sampled"),
    ({**GOOD, "rollout_log_probs": [-0.1, -0.2, -0.3]}, "has 3 entries, 'observation_tokens' 4"),
    ({**GOOD, "rollout_log_probs": [0.0, float("nan"), -0.2, -0.3]}, "nan, not a finite number"),
    ({**GOOD, "reward": float("nan")}, "'reward' holds nan"),
    ({**GOOD, "reward": float("inf")}, "'reward' holds inf"),
    ({**GOOD, "reward": "high"}, "'reward' holds 'high', not a number"),
    ({**GOOD, "reward": torch.tensor([1.0, 2.0])}, "not a number"),
    ({**GOOD, "scores": float("nan")}, "'scores' holds nan"),
    ({**GOOD, "extra_logs": {"kind": "good"}}, "'good', not a number"),
    ({**GOOD, "extra_logs": [1.0]}, "'extra_logs' is list"),
    ({"segments": [], "reward": 1.0}, "'segments' is"),
    ({"segments": [{"observation_tokens": [1]}], "reward": 1.0}, "needs 'observation_tokens' and 'action_ranges'"),
]


@pytest.mark.parametrize(("returned", "message"), BROKEN)
def test_a_dict_that_cannot_be_trained_on_fails_the_sample_and_says_why(returned: Any, message: str) -> None:
    trajectory = run(Returning(returned))
    assert trajectory.reward is None
    assert trajectory.segments == []
    assert re.search(message, trajectory.failure or ""), trajectory.failure


def test_a_missing_reward_is_never_zero() -> None:
    trajectory = run(Returning({**GOOD, "reward": None}))
    assert trajectory.reward is None
    assert trajectory.score is None
    assert trajectory.failure == "the agent returned no reward"
    named = run(Returning({**GOOD, "reward": None, "failure": "the judge is away"}))
    assert named.failure == "the judge is away"


@pytest.mark.parametrize(("scores", "expected"), [(0.0, 0.0), (None, 0.5), (1.0, 1.0)])
def test_only_a_missing_score_falls_back_to_the_reward(scores: float | None, expected: float) -> None:
    assert run(Returning({**GOOD, "scores": scores})).score == expected


def test_an_exception_in_an_executor_fails_its_sample_alone_and_names_the_place() -> None:
    def fail(arguments: dict[str, Any]) -> None:
        raise KeyError("no such tool")

    trajectory = run(Returning(fail))
    assert trajectory.reward is None
    assert "KeyError: 'no such tool'" in trajectory.failure
    assert "test_agents_runner.py:" in trajectory.failure


def test_one_fault_of_many_samples_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "_reported", set())
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            run(Returning(ValueError(f"row {number} is broken")))
        run(Returning(ValueError("another fault")))
    assert len(caplog.records) == 2


def test_a_sample_that_takes_too_long_is_ended_and_its_request_cancelled() -> None:
    ended = []

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    trajectory = run(Returning(lambda _: hang()), timeout=0.1)
    assert trajectory.failure == "the sample took longer than 0.1 s"
    assert ended == [True]


def test_a_sample_that_does_not_give_way_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "CANCEL_GRACE_S", 0.1)

    async def stubborn() -> dict[str, Any]:
        for _ in range(10):
            try:
                await asyncio.sleep(0.2)
            except asyncio.CancelledError:
                continue
        return GOOD

    assert run(Returning(lambda _: stubborn()), timeout=0.1).failure == "the sample took longer than 0.1 s"


def test_a_dead_engine_is_no_failure_of_a_sample() -> None:
    engine = ScriptedEngine(RuntimeError("request lost"))
    engine.dead = ConnectionError("the engine's core has died")
    with pytest.raises(ConnectionError, match="core has died"):
        run(SingleTurnAgentExecutor(FixedReward(None)), engine)


def test_a_request_that_the_engine_refuses_is_a_failure_of_its_sample() -> None:
    trajectory = run(SingleTurnAgentExecutor(FixedReward(None)), ScriptedEngine(ValueError("prompt too long")))
    assert "prompt too long" in trajectory.failure


def test_what_each_turn_earned_and_how_it_was_sampled_is_kept() -> None:
    turns = {"action_ranges": [(1, 2), (3, 4)], "step_rewards": torch.tensor([0.25, 0.25])}
    more = {"stop_reason": "environment", "weight_versions": [5, 6]}
    trajectory = run(Returning({**GOOD, **turns, **more}))
    assert trajectory.step_rewards == [0.25, 0.25]
    assert trajectory.segments[0].weight_versions == [5, 6]
    assert trajectory.segments[0].stop_reason == "environment"
    assert run(Returning(GOOD)).step_rewards is None


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"step_rewards": [0.25, 0.25]}, "'step_rewards' has 2 entries for 1 action ranges"),
        ({"step_rewards": [0.25]}, "'step_rewards' sum to 0.25, but 'reward' is 0.5"),
        ({"step_rewards": [float("nan")]}, "'step_rewards' holds nan"),
        ({"step_rewards": 0.5}, "'step_rewards' is float, not a list"),
        ({"weight_versions": [1, 2]}, "'weight_versions' has 2 entries for 1 action ranges"),
        ({"stop_reason": "bored"}, "'stop_reason' is 'bored', not one of stop, length, environment, error"),
    ],
)
def test_turns_that_do_not_fit_the_ranges_fail_the_sample(extra: dict[str, Any], message: str) -> None:
    trajectory = run(Returning({**GOOD, **extra}))
    assert trajectory.reward is None
    assert trajectory.step_rewards is None
    assert message in trajectory.failure


def test_a_changed_label_does_not_reach_other_samples_of_the_prompt() -> None:
    label = {"answer": [3]}
    run(Returning(lambda arguments: arguments["label"]["answer"].clear() or GOOD), label=label)
    assert label == {"answer": [3]}


def test_an_executor_that_cancels_itself_fails_its_sample_alone() -> None:
    async def leave() -> None:
        raise asyncio.CancelledError

    assert "execute() cancelled itself" in run(Returning(lambda _: leave())).failure


def test_tries_of_a_sample_share_its_time() -> None:
    executor = Returning(lambda _: asyncio.sleep(60))
    executor.retries = 5
    assert run(executor, timeout=0.2).failure == "the sample took longer than 0.2 s"


def test_a_try_that_succeeds_leaves_no_failure_behind() -> None:
    outcomes = [ValueError("once"), {**GOOD, "reward": None}, GOOD]
    executor = Returning(lambda _: outcomes.pop(0))
    executor.retries = 3
    trajectory = run(executor)
    assert (trajectory.reward, trajectory.failure, outcomes) == (0.5, None, [])


class SpeechlessError(Exception):
    """Its message is a fault of its own."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_whose_message_cannot_be_read_is_that_samples_failure_alone() -> None:
    assert _describe(_raised(SpeechlessError())).startswith("SpeechlessError: its message cannot be read (at ")


def _raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught
