"""Every form that a reward function may return, and what is not one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from openrlhf.agents.reward_values import RewardFailure, RewardFormError, RewardResult, read_rewards


@pytest.mark.parametrize(
    "returned",
    [
        {"rewards": torch.tensor([0.5]), "scores": torch.tensor([0.25]), "extra_logs": {"a": torch.tensor([2.0])}},
        {"rewards": torch.tensor(0.5), "scores": torch.tensor(0.25), "extra_logs": {"a": torch.tensor(2.0)}},
        {"rewards": torch.tensor([[0.5]]), "scores": 0.25, "extra_logs": {"a": 2}},
        {"rewards": [0.5], "scores": [0.25], "extra_logs": {"a": [2.0]}},
        {"rewards": 0.5, "scores": 0.25, "extra_logs": {"a": 2.0, "left_out": None}},
        {"rewards": (np.float32(0.5),), "scores": np.array([0.25]), "extra_logs": {"a": np.int64(2)}},
        {"rewards": [torch.tensor(0.5)], "scores": [torch.tensor([0.25])], "extra_logs": {"a": [torch.tensor(2)]}},
    ],
)
def test_one_sample_may_be_rewarded_in_any_documented_form(returned: Any) -> None:
    assert read_rewards(returned, 1) == [RewardResult(reward=0.5, score=0.25, extra_logs={"a": 2.0})]


@pytest.mark.parametrize("returned", [1, 1.0, True, [1.0], torch.tensor(1.0), torch.tensor([1.0]), np.ones(1)])
def test_rewards_may_be_returned_without_a_dict(returned: Any) -> None:
    assert read_rewards(returned, 1) == [RewardResult(reward=1.0, score=1.0)]


def test_a_batch_is_split_over_its_samples() -> None:
    returned = {"rewards": torch.tensor([1.0, 0.0]), "scores": [0.5, None], "extra_logs": {"all": 3.0, "each": [4, 5]}}
    assert read_rewards(returned, 2) == [
        RewardResult(reward=1.0, score=0.5, extra_logs={"all": 3.0, "each": 4.0}),
        RewardResult(reward=0.0, score=0.0, extra_logs={"all": 3.0, "each": 5.0}),
    ]


def test_only_an_absent_or_null_score_falls_back_to_the_reward() -> None:
    responses = [
        {"rewards": 1.0, "scores": 0.0},
        {"rewards": 1.0},
        {"rewards": 1.0, "scores": None},
        {"rewards": 0.0, "scores": 1.0},
    ]
    outcomes = [read_rewards(response, 1)[0] for response in responses]
    assert [outcome.reward for outcome in outcomes] == [1.0, 1.0, 1.0, 0.0]
    assert [outcome.score for outcome in outcomes] == [0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_no_finite_number_fails_its_sample_alone(value: float) -> None:
    first, second = read_rewards([value, 1.0], 2)
    assert first == RewardFailure(f"the reward is {value}")
    assert second == RewardResult(reward=1.0, score=1.0)


def test_a_missing_reward_fails_its_sample_and_is_never_zero() -> None:
    first, second = read_rewards({"rewards": [None, 1.0]}, 2)
    assert first == RewardFailure("the reward is None")
    assert second.reward == 1.0


def test_a_score_that_is_no_finite_number_fails_its_sample() -> None:
    assert read_rewards({"rewards": 1.0, "scores": float("nan")}, 1) == [RewardFailure("the score is nan")]


@pytest.mark.parametrize(
    ("returned", "count", "message"),
    [
        ([1.0, 2.0], 1, "'rewards': expected 1 values, one for each query, found 2"),
        ([], 1, "expected 1 values, one for each query, found 0"),
        (1.0, 3, "expected 3 values, one for each query, found 1"),
        ({"rewards": [1.0, 2.0], "scores": [1.0]}, 2, "'scores': expected 2 values, one for each query, found 1"),
        ({"rewards": [1.0] * 3, "extra_logs": {"a": [1, 2]}}, 3, r"extra_logs\['a'\]: expected 1 or 3 values, found 2"),
        ({"scores": [1.0]}, 1, r"no 'rewards' in what was returned, only \['scores'\]"),
        ({}, 1, "no 'rewards' in what was returned, only nothing"),
        ({"rewards": "1.0"}, 1, "'rewards' holds '1.0', not a number"),
        ({"rewards": object()}, 1, "'rewards' holds object"),
        ({"rewards": 1.0, "extra_logs": {"a": "x"}}, 1, r"extra_logs\['a'\] holds 'x', not a number"),
        ({"rewards": 1.0, "extra_logs": [1.0]}, 1, "'extra_logs' is list"),
    ],
)
def test_what_cannot_be_matched_to_the_samples_says_what_was_expected_and_found(
    returned: Any, count: int, message: str
) -> None:
    with pytest.raises(RewardFormError, match=message):
        read_rewards(returned, count)
