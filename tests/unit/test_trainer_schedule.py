"""How long the schedule of a run is, and what is said where nobody can know it."""

from __future__ import annotations

import pytest

from openrlhf.config import PPOConfig
from openrlhf.trainer.schedule import filter_note
from tests.unit.config_args import built

SIZES = ("--rollout.batch_size", "8", "--rollout.n_samples_per_prompt", "4", "--train.batch_size", "16")
FILTER = ("--algo.dynamic_filtering_enable", "--algo.advantage.estimator", "rloo")


def config_of(*flags: str) -> PPOConfig:
    config = built("train_ppo_ray", {}, *SIZES, *flags)
    assert isinstance(config, PPOConfig)
    return config


def test_a_filter_makes_the_schedule_an_upper_bound_and_its_length_is_told() -> None:
    # 20 prompts twice in steps of 8: five of 32 samples, each two updates.
    note = filter_note(config_of(*FILTER, "--train.num_episodes", "2"), 20)
    assert note is not None and "spans 10 updates, as many as there are if every group passes" in note
    assert filter_note(config_of(), 20) is None


def test_updates_of_a_frozen_policy_do_not_count() -> None:
    flags = ("--algo.dynamic_filtering_enable", "--algo.advantage.estimator", "gae", "--critic.freezing_steps", "2")
    note = filter_note(config_of(*flags, "--train.num_episodes", "2"), 20)
    assert note is not None and "spans 6 updates" in note


@pytest.mark.parametrize("name", ["constant", "constant_with_warmup", "inverse_sqrt"])
def test_a_schedule_without_an_end_needs_no_note(name: str) -> None:
    assert filter_note(config_of(*FILTER, "--actor.lr_scheduler", name), 20) is None
