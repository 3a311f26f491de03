"""A flag of a feature that does not exist yet parses and is then refused; none is accepted and ignored."""

from __future__ import annotations

import pytest

from openrlhf.config import COMMANDS, ConfigError, check, unbuilt
from openrlhf.config.flags import Flag, flags_of
from openrlhf.config.unbuilt import check_unbuilt
from tests.unit.config_args import DPO, RL, RM, SFT, built, make_files, rl, with_value

BASE = {"train_sft": SFT, "train_rm": RM, "train_dpo": DPO, "train_ppo_ray": RL}

CASES = [(command, name) for command in BASE for name in unbuilt.FLAGS if name in flags_of(COMMANDS[command])]


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def plain():
    return {command: built(command, base) for command, base in BASE.items()}


def other_value(flag: Flag):
    """Returns: a value that turns a flag's feature on."""
    if flag.choices:
        return next(choice for choice in flag.choices if choice != flag.default)
    return {bool: True, int: 2, float: 0.5, str: "something"}[flag.kind]


@pytest.mark.parametrize(("command", "name"), CASES)
def test_flag_of_a_missing_feature_is_refused_by_name(command, name, plain):
    flag = flags_of(COMMANDS[command])[name]
    config = with_value(plain[command], flag, other_value(flag))

    with pytest.raises(ConfigError, match=f"--{name} .*not built yet"):
        check_unbuilt(config)
    with pytest.raises(ConfigError):
        check(config)


def test_every_flag_of_the_tables_exists():
    names = {name for tree in COMMANDS.values() for name in flags_of(tree)}
    assert set(unbuilt.FLAGS) <= names


def test_estimators_and_losses_are_those_of_the_algorithms():
    from openrlhf.algorithms.advantages import ESTIMATORS
    from openrlhf.algorithms.policy_loss import DEMANDED_AGGREGATION, POLICY_LOSSES
    from openrlhf.config.algo import SEQUENCE_LOSSES, default_aggregation

    flags = flags_of(COMMANDS["train_ppo_ray"])
    assert set(flags["algo.advantage.estimator"].choices) == set(ESTIMATORS)
    assert set(flags["actor.policy_loss_type"].choices) == set(POLICY_LOSSES)
    assert set(SEQUENCE_LOSSES) == set(DEMANDED_AGGREGATION)
    for loss, demanded in DEMANDED_AGGREGATION.items():
        assert default_aggregation("dr_grpo", loss) == demanded


@pytest.mark.parametrize(
    "extra",
    [
        ["--actor.entropy_coef", "0"],
        ["--ckpt.best_metric_key", "none"],
        ["--actor.optim", "adam"],
        ["--actor.policy_loss_type", "ppo"],
        ["--eval.steps", "-1"],
        ["--ds.lora.rank", "0"],
    ],
)
def test_value_that_leaves_a_feature_off_is_accepted(extra):
    assert rl(*extra).algo.advantage.estimator == "reinforce"
