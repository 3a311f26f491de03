"""Every setting of an RL run reaches the part that it is for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from openrlhf.config import PPOConfig, resolve, to_flags_yaml
from openrlhf.trainer import rl_specs
from openrlhf.trainer.launch import critic_source
from openrlhf.utils.seeds import derive_seed
from tests.unit.config_args import built

PROMPTS, PAD = 37, 5
RLOO = ("--algo.advantage.estimator", "rloo")
NO_KL = ("--algo.kl.init_coef", "0")
KL_IN_LOSS = ("--algo.kl.use_loss", "--algo.kl.estimator", "k3")
EVAL_SEED = derive_seed(42, 7919) % 2**31

PARTS: dict[str, Callable[[PPOConfig], Any]] = {
    "policy": rl_specs.policy_loss_spec,
    "value": rl_specs.value_loss_spec,
    "shaping": rl_specs.reward_shaping,
    "loop": lambda config: rl_specs.loop_settings(config, PAD),
    "update": lambda config: rl_specs.update_settings(config, PAD),
    "sampling": lambda config: rl_specs.sampling_settings(config, seeded=True),
    "unseeded": lambda config: rl_specs.sampling_settings(config, seeded=False),
    "eval": lambda config: rl_specs.eval_settings(config, seeded=True),
    "unseeded_eval": lambda config: rl_specs.eval_settings(config, seeded=False),
    "outputs": lambda config: rl_specs.output_settings(config, PROMPTS),
}

# Flags, where they arrive, what stands there, and what stands there without them.
TABLE: list[tuple[tuple[str, ...], str, Any, Any]] = [
    (("--actor.policy_loss_type", "gspo"), "policy.name", "gspo", "ppo"),
    (("--actor.policy_loss_type", "gspo"), "policy.aggregation", "seq_mean", "token_mean"),
    (("--algo.advantage.estimator", "dr_grpo"), "policy.aggregation", "constant", "token_mean"),
    (("--algo.loss_aggregation", "seq_mean"), "policy.aggregation", "seq_mean", "token_mean"),
    (("--actor.eps_clip", "0.1"), "policy.clip_low", 0.1, 0.2),
    (("--actor.eps_clip", "0.1"), "policy.clip_high", 0.1, 0.2),
    (("--actor.eps_clip_low_high", "0.3", "0.4"), "policy.clip_low", 0.3, 0.2),
    (("--actor.eps_clip_low_high", "0.3", "0.4"), "policy.clip_high", 0.4, 0.2),
    (("--actor.dual_clip", "3"), "policy.dual_clip", 3.0, None),
    (("--rollout.max_new_tokens", "64"), "policy.constant", 64.0, 2048.0),
    (("--data.max_len", "96"), "policy.constant", 96.0, 2048.0),
    (("--algo.kl.use_loss", "--algo.kl.estimator", "k3"), "policy.kl_estimator", "k3", None),
    # Without a coefficient there is no reference model, so no KL in the loss either.
    (("--algo.kl.use_loss", "--algo.kl.init_coef", "0"), "policy.kl_estimator", None, None),
    (("--rollout.temperature", "0.6"), "policy.temperature", 0.6, 1.0),
    (("--algo.kl.corrected",), "policy.kl_corrected", True, False),
    (("--actor.entropy_coef", "0.01"), "policy.entropy_coef", 0.01, None),
    (("--actor.entropy_coef", "0"), "policy.entropy_coef", None, None),
    (RLOO, "value", None, ...),
    (("--critic.value_clip", "0.2"), "value.clip", 0.2, 0.5),
    (("--algo.loss_aggregation", "constant"), "value.aggregation", "constant", "token_mean"),
    (("--rollout.max_new_tokens", "64"), "value.constant", 64.0, 2048.0),
    (("--reward.clip_range", "-1", "2"), "shaping.clip", (-1.0, 2.0), (-10.0, 10.0)),
    (("--reward.stop_properly_penalty_coef", "0.5"), "shaping.stop_properly_coef", 0.5, None),
    (("--reward.overlong_buffer_len", "16"), "shaping.overlong_buffer", 16.0, None),
    (("--reward.overlong_penalty_factor", "2"), "shaping.overlong_factor", 2.0, 1.0),
    (("--rollout.max_new_tokens", "64"), "shaping.max_new_tokens", 64, None),
    (("--algo.kl.target", "0.5"), "loop.algo.kl.target", 0.5, None),
    (("--algo.advantage.gamma", "0.9"), "loop.algo.advantage.gamma", 0.9, 1.0),
    (("--reward.clip_range", "-1", "2"), "loop.shaping.clip", (-1.0, 2.0), (-10.0, 10.0)),
    (("--rollout.temperature", "0.6"), "loop.temperature", 0.6, 1.0),
    (("--rollout.micro_batch_size", "3"), "loop.budget.micro_batch_size", 3, 1),
    (("--train.micro_batch_size", "3"), "loop.budget.micro_batch_size", 1, 1),
    (("--train.dynamic_batch_enable",), "loop.budget.micro_batch_size", None, 1),
    (("--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "99"), "loop.budget.max_tokens", 99, None),
    (("--train.dynamic_batch_enable", "--rollout.max_tokens_per_gpu", "77"), "loop.budget.max_tokens", 77, None),
    ((), "loop.pad_token_id", PAD, PAD),
    (("--train.step_timeout", "60"), "loop.timeout", 60.0, 3600.0),
    (("--eval.steps", "4"), "loop.eval_steps", 4, -1),
    ((*NO_KL, "--train.batch_size", "96"), "loop.on_policy_samples", 96, 0),
    (("--train.max_epochs", "3"), "loop.epochs", 3, 1),
    (("--logger.profile_steps", "3:5"), "loop.trace.steps", (3, 5), ...),
    (("--logger.profile_steps", "4", "--ckpt.output_dir", "/out"), "loop.trace.folder", Path("/out/profile"), ...),
    ((), "loop.trace", None, None),
    (("--ds.param_dtype", "fp32"), "loop.gap_limit", 0.01, 0.3),
    (("--rollout.temperature", "0.6"), "loop.gap_limit", 0.5, 0.3),
    (("--rollout.temperature", "1.7"), "loop.gap_limit", 0.3, 0.3),
    (("--train.max_epochs", "3"), "update.train.max_epochs", 3, 1),
    (("--actor.eps_clip", "0.1"), "update.policy_loss.clip_low", 0.1, 0.2),
    (("--critic.value_clip", "0.2"), "update.value_loss.clip", 0.2, 0.5),
    (("--critic.freezing_steps", "2"), "update.freezing_steps", 2, 0),
    ((*RLOO, "--critic.freezing_steps", "2"), "update.freezing_steps", 0, 0),
    (("--train.micro_batch_size", "3"), "update.budget.micro_batch_size", 3, 1),
    (("--rollout.micro_batch_size", "3"), "update.budget.micro_batch_size", 1, 1),
    (("--train.dynamic_batch_enable",), "update.budget.max_tokens", 16192, None),
    (("--train.dynamic_batch_enable", "--rollout.max_tokens_per_gpu", "77"), "update.budget.max_tokens", 16192, None),
    ((), "update.pad_token_id", PAD, PAD),
    (("--rollout.n_samples_per_prompt", "4"), "sampling.rollout.n_samples_per_prompt", 4, 1),
    (("--train.num_episodes", "3"), "sampling.num_episodes", 3, 1),
    (("--train.seed", "7"), "sampling.seed", 7, 42),
    (("--train.seed", "7"), "sampling.sample_seed", 7, 42),
    (("--train.seed", "7"), "unseeded.sample_seed", None, None),
    (("--algo.advantage.is_correction_enable",), "sampling.logprobs", True, False),
    (("--algo.dynamic_filtering_enable",), "sampling.filter_range", (0.0, 1.0), None),
    (("--algo.dynamic_filtering_range", "0.1", "0.9"), "sampling.filter_range", None, None),
    (("--eval.n_samples_per_prompt", "8"), "eval.samples", 8, 4),
    (("--rollout.n_samples_per_prompt", "8"), "eval.samples", 4, 4),
    (("--eval.temperature", "0"), "eval.sampling.temperature", 0.0, 0.6),
    (("--rollout.temperature", "0.3"), "eval.sampling.temperature", 0.6, 0.6),
    (("--rollout.top_p", "0.9"), "eval.sampling.top_p", 0.9, 1.0),
    (("--rollout.max_new_tokens", "64"), "eval.sampling.max_new_tokens", 64, None),
    (("--train.seed", "7"), "eval.sampling.seed", derive_seed(7, 7919) % 2**31, EVAL_SEED),
    (("--train.seed", "7"), "unseeded_eval.sampling.seed", None, None),
    (("--reward.model_name_or_path", "judge"), "eval.with_pass_rates", False, True),
    (("--ckpt.save_steps", "3"), "outputs.ckpt.save_steps", 3, -1),
    (("--logger.logging_steps", "3"), "outputs.logger.logging_steps", 3, 1),
    (("--rollout.save_samples", "3"), "outputs.save_samples", 3, 16),
    (("--train.step_timeout", "60"), "outputs.timeout", 60.0, 3600.0),
    (("--critic.save_value_network",), "outputs.save_critic", True, False),
    (("--train.enable_ema",), "outputs.save_ema", True, False),
]  # fmt: skip


def config_of(*flags: str) -> PPOConfig:
    config = resolve(built("train_ppo_ray", {}, *flags))
    assert isinstance(config, PPOConfig)
    return config


@pytest.mark.parametrize(("flags", "place", "there", "without"), TABLE, ids=lambda value: str(value)[:60])
def test_a_setting_arrives_where_it_belongs(flags: tuple[str, ...], place: str, there: Any, without: Any) -> None:
    part, _, rest = place.partition(".")

    def found(config: PPOConfig) -> Any:
        made = PARTS[part](config)
        return attrgetter(rest)(made) if rest else made

    assert found(config_of(*flags)) == there
    if without is not ...:
        assert found(config_of()) == without


def test_the_table_has_a_row_for_every_field_of_every_part() -> None:
    places = {place for _, place, *_ in TABLE}
    config = config_of()
    missing = [
        f"{name}.{field.name}"
        for name, make in PARTS.items()
        if not name.startswith("unseeded")
        for field in dataclasses.fields(make(config))
        if not any(place == f"{name}.{field.name}" or place.startswith(f"{name}.{field.name}.") for place in places)
    ]
    # What a resumed run must share, and all settings as text, have tests of their own.
    assert missing == ["outputs.fixed", "outputs.config_yaml"]


OF_BOTH = [
    ("optim", "muon"),
    ("lr_scheduler", "constant"),
    ("lr_warmup_ratio", "0.5"),
    ("min_lr_ratio", "0.5"),
    ("adam.lr", "0.5"),
    ("adam.betas", "0.5", "0.6"),
    ("adam.eps", "0.5"),
    ("adam.weight_decay", "0.5"),
]
FIXED = [
    ("--train.seed", "7"),
    ("--train.batch_size", "64"),
    ("--train.max_epochs", "2"),
    ("--train.num_episodes", "2"),
    ("--train.enable_ema",),
    ("--rollout.batch_size", "64"),
    ("--rollout.n_samples_per_prompt", "4"),
    ("--algo.advantage.estimator", "rloo"),
    ("--algo.dynamic_filtering_enable",),
    ("--data.prompt_dataset", "other"),
    ("--critic.freezing_steps", "2"),
    ("--critic.model_name_or_path", "other"),
    ("--actor.model_name_or_path", "other"),
    ("--ds.lora.rank", "4"),
    *((f"--{owner}.{flag}", *value) for owner in ("actor", "critic") for flag, *value in OF_BOTH),
]


def fixed_of(*flags: str) -> dict[str, Any]:
    return PARTS["outputs"](config_of(*flags)).fixed


@pytest.mark.parametrize("flags", FIXED, ids=lambda flags: flags[0])
def test_what_order_seeds_schedule_and_optimizer_follow_from_is_fixed_for_a_resumed_run(flags: tuple[str, ...]) -> None:
    # A critic of its own, which would else follow the policy.
    critic = ("--critic.model_name_or_path", "critic")
    before, after = fixed_of(*critic), fixed_of(*critic, *flags)
    assert {name for name in before.keys() & after.keys() if before[name] != after[name]} == {flags[0]}


def test_a_critic_fixes_its_source_and_a_run_without_one_fixes_nothing_of_it() -> None:
    assert fixed_of("--reward.model_name_or_path", "judge,other")["--critic.model_name_or_path"] == "judge"
    assert fixed_of("--actor.model_name_or_path", "actor")["--critic.model_name_or_path"] == "actor"
    assert fixed_of("--critic.freezing_steps", "0") == fixed_of()
    assert fixed_of(*RLOO) == fixed_of(*RLOO, "--critic.adam.lr", "0.5", "--critic.freezing_steps", "2")


def test_the_number_of_prompts_is_fixed_and_all_settings_stand_in_the_text() -> None:
    config = config_of("--train.seed", "7")
    outputs = PARTS["outputs"](config)
    assert outputs.fixed["prompts"] == PROMPTS and outputs.config_yaml == to_flags_yaml(config)
    assert outputs.fixed.keys() == {"prompts", *(flags[0] for flags in FIXED)}
    assert json.loads(json.dumps(outputs.fixed)) == outputs.fixed


def test_evaluation_draws_from_seeds_of_its_own_and_asks_for_no_logprobs() -> None:
    settings = PARTS["eval"](config_of("--algo.advantage.is_correction_enable"))
    assert settings.sampling.seed != 42 and settings.sampling.logprobs is False


@pytest.mark.parametrize(
    ("flags", "path", "fresh"),
    [
        ((), "actor", True),
        (("--reward.model_name_or_path", "judge,other"), "judge", False),
        (("--reward.model_name_or_path", "judge", "--critic.fresh_head"), "judge", True),
        (("--reward.model_name_or_path", "judge", "--critic.model_name_or_path", "critic"), "critic", False),
        (("--critic.model_name_or_path", "critic", "--critic.fresh_head"), "critic", True),
    ],
)
def test_a_critic_starts_from_its_own_model_or_the_reward_model_or_the_policy(
    flags: tuple[str, ...], path: str, fresh: bool
) -> None:
    assert critic_source(config_of("--actor.model_name_or_path", "actor", *flags)) == (path, fresh)


@pytest.mark.parametrize(
    "flags", [NO_KL, KL_IN_LOSS, (*NO_KL, *RLOO), (*NO_KL, "--critic.freezing_steps", "2")], ids=str
)
def test_old_log_probs_are_left_to_the_update_where_nothing_reads_them_before_it(flags: tuple[str, ...]) -> None:
    assert rl_specs.on_policy_samples(config_of(*flags, "--train.batch_size", "96")) == 96


@pytest.mark.parametrize(
    "flags",
    [
        (),
        (*NO_KL, "--train.max_epochs", "2"),
        (*NO_KL, "--algo.advantage.is_correction_enable"),
        (*KL_IN_LOSS, "--algo.kl.target", "0.1"),
        (*KL_IN_LOSS, "--critic.freezing_steps", "2"),
    ],
    ids=str,
)
def test_old_log_probs_are_computed_where_something_reads_them_before_the_update(flags: tuple[str, ...]) -> None:
    assert rl_specs.on_policy_samples(config_of(*flags)) == 0
