"""Every number has a range, and what lies outside is refused by name."""

from __future__ import annotations

import math

import pytest

from openrlhf.config import COMMANDS, ConfigError, parse
from openrlhf.config.checks_values import RANGES, check_values, range_of
from openrlhf.config.flags import flags_of
from tests.unit.config_args import built, with_value

NUMBERS = {
    f"{command} --{flag.name}": (command, flag)
    for command, tree in COMMANDS.items()
    for flag in flags_of(tree).values()
    if flag.kind in (int, float)
}


@pytest.mark.parametrize("key", NUMBERS)
def test_every_number_has_a_range_that_holds_its_default(key):
    _, flag = NUMBERS[key]
    allowed = range_of(flag)

    assert allowed is not None
    values = flag.default if isinstance(flag.default, tuple) else (flag.default,)
    assert all(value is None or allowed.holds(value) for value in values)


def test_every_range_is_for_some_flag():
    names = {flag.name for _, flag in NUMBERS.values()}
    used = names | {name.rpartition(".")[2] for name in names}
    assert set(RANGES) <= used


@pytest.mark.parametrize("key", [key for key, (_, flag) in NUMBERS.items() if flag.kind is float])
def test_not_a_number_is_refused_everywhere(key):
    command, flag = NUMBERS[key]
    value = (math.nan,) * flag.nargs if flag.nargs else math.nan

    with pytest.raises(ConfigError, match=f"--{flag.name} must be"):
        check_values(with_value(COMMANDS[command](), flag, value))


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("actor.adam.lr", "0"),
        ("actor.adam.lr", "inf"),
        ("actor.adam.betas", "0.9 1"),
        ("actor.lr_warmup_ratio", "1.5"),
        ("actor.max_norm", "-1"),
        ("actor.dual_clip", "1"),
        ("actor.eps_clip", "0"),
        ("actor.eps_clip_low_high", "0.2 -0.1"),
        ("actor.num_gpus_per_node", "0"),
        ("train.batch_size", "0"),
        ("train.micro_batch_size", "-1"),
        ("train.seed", "-1"),
        ("rollout.top_p", "0"),
        ("rollout.top_p", "1.1"),
        ("rollout.temperature", "0"),
        ("rollout.n_samples_per_prompt", "0"),
        ("algo.advantage.gamma", "1.1"),
        ("algo.kl.init_coef", "-0.1"),
        ("vllm.gpu_memory_utilization", "1.5"),
        ("ds.zero_stage", "4"),
        ("eval.steps", "0"),
        ("ckpt.save_steps", "0"),
        ("ckpt.save_steps", "-2"),
        ("reward.timeout", "0"),
        ("data.max_len", "1"),
    ],
)
def test_number_outside_its_range_is_refused_with_flag_and_value(flag, values):
    config = built("train_ppo_ray", {}, f"--{flag}", *values.split())

    with pytest.raises(ConfigError, match=f"--{flag} must be") as caught:
        check_values(config)
    assert str(float(values.split()[-1])).rstrip("0").rstrip(".") in str(caught.value)


@pytest.mark.parametrize(
    "flag", ["reward.clip_range", "algo.dynamic_filtering_range", "algo.advantage.is_correction_threshold"]
)
@pytest.mark.parametrize("values", ["2 1", "1 1"])
def test_low_number_must_lie_below_the_high_one(flag, values):
    with pytest.raises(ConfigError, match=f"--{flag} takes a low and a higher number"):
        check_values(built("train_ppo_ray", {}, f"--{flag}", *values.split()))


def test_lower_clip_may_be_wider_than_the_upper_one():
    check_values(parse("train_ppo_ray", ["--actor.eps_clip_low_high", "0.3", "0.2"]))


def test_never_is_minus_one_and_no_bound_is_infinite():
    check_values(parse("train_ppo_ray", ["--ckpt.save_steps", "-1", "--reward.clip_range", "-inf", "inf"]))
    assert math.isinf(parse("train_ppo_ray", []).ckpt.max_mem)
