"""Flags that do not fit together are refused with their names and the remedy; those without effect are named."""

from __future__ import annotations

import json

import pytest

from openrlhf.config import ConfigError, notes
from openrlhf.config.checks_rl import RESERVED_ENGINE_ARGUMENTS, check_rl
from openrlhf.config.checks_training import check_training
from openrlhf.config.notes import batch_notes
from tests.unit.config_args import RL, SFT, built, checked, environment, make_files, rl, sft


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)


def refusal(make, *extra: str) -> str:
    with pytest.raises(ConfigError) as caught:
        make(*extra)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refusal_of_rl_alone(*extra: str) -> str:
    """The sentence of the RL checks, features that do not exist yet included."""
    with pytest.raises(ConfigError) as caught:
        check_rl(built("train_ppo_ray", RL, *extra))
    return str(caught.value)


def refusal_of_training_alone(*extra: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_training(built("train_sft", SFT, *extra))
    return str(caught.value)


def test_plain_commands_pass_without_a_note():
    assert notes(rl()) == []
    assert notes(sft()) == []


# Groups and batches


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_baseline", "group_norm", "dr_grpo", "opo"])
def test_group_estimator_with_one_sample_is_refused(estimator):
    message = refusal(rl, "--algo.advantage.estimator", estimator)
    assert f"--algo.advantage.estimator {estimator}" in message
    assert "--rollout.n_samples_per_prompt must be 2 or more" in message

    rl("--algo.advantage.estimator", estimator, "--rollout.n_samples_per_prompt", "2")


@pytest.mark.parametrize("estimator", ["gae", "reinforce"])
def test_estimator_without_groups_takes_one_sample(estimator):
    check_rl(built("train_ppo_ray", RL, "--algo.advantage.estimator", estimator))


def test_optimizer_step_larger_than_a_rollout_is_refused():
    message = refusal(rl, "--rollout.batch_size", "16", "--rollout.n_samples_per_prompt", "4")
    assert "--train.batch_size 128 is more than the 64 samples" in message
    rl("--rollout.batch_size", "32", "--rollout.n_samples_per_prompt", "4")


def test_batch_smaller_than_the_workers_is_refused():
    message = refusal(rl, "--actor.num_gpus_per_node", "4", "--train.batch_size", "2")
    assert "--train.batch_size 2" in message and "4 ranks" in message

    with environment(WORLD_SIZE="4"):
        assert "4 ranks" in refusal(sft, "--train.batch_size", "2")
        sft("--train.batch_size", "4")


def test_batches_that_do_not_divide_are_explained_and_not_refused():
    config = rl("--rollout.batch_size", "100", "--rollout.n_samples_per_prompt", "3")
    (note,) = batch_notes(config)
    assert "300 samples" in note and "--train.batch_size 128" in note and "3 updates of about 100" in note


def test_token_budget_below_the_longest_row_is_noted():
    config = rl("--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "1000")
    assert any("--train.max_tokens_per_gpu 1000 is below --data.max_len 2048" in note for note in notes(config))


def test_token_budget_on_padded_batches_is_refused():
    assert "--ds.no_packing_samples" in refusal(rl, "--train.dynamic_batch_enable", "--ds.no_packing_samples")


def test_no_room_for_a_prompt_is_refused():
    message = refusal(rl, "--data.max_len", "64", "--rollout.max_new_tokens", "64")
    assert "--rollout.max_new_tokens 64" in message and "--data.max_len 64" in message


# Placement


def test_colocated_groups_must_be_of_one_size():
    message = refusal(rl, "--train.colocate_actor_ref", "--ref.num_gpus_per_node", "2")
    assert "--train.colocate_actor_ref" in message and "--ref.num_gpus_per_node" in message
    rl("--train.colocate_actor_ref")

    message = refusal(rl, "--train.colocate_all", "--ref.num_nodes", "2")
    assert "--train.colocate_all" in message and "ref 2 x 1" in message


def test_colocated_engines_must_fill_the_actors_places():
    four = ["--train.colocate_all", "--actor.num_gpus_per_node", "4", "--ref.num_gpus_per_node", "4"]
    for engines, width in ((2, 1), (6, 1), (4, 2)):
        more = ["--vllm.num_engines", str(engines), "--vllm.tensor_parallel_size", str(width)]
        message = refusal(rl, *four, *more)
        assert f"--vllm.num_engines {engines} x --vllm.tensor_parallel_size {width}" in message
    assert rl(*four, "--vllm.num_engines", "4").engines_per_place == 1
    assert rl(*four, "--vllm.num_engines", "12").engines_per_place == 3
    wide = ("--vllm.num_engines", "2", "--vllm.tensor_parallel_size", "2")
    assert rl(*four, *wide).engines_per_place == 1


def test_no_kl_means_no_reference_model_and_no_rule_for_its_place():
    config = rl(
        "--train.colocate_all", "--ref.num_gpus_per_node", "4", "--algo.kl.init_coef", "0", "--algo.kl.use_loss",
    )  # fmt: skip
    assert not config.algo.kl.enabled
    assert any("--ref.num_gpus_per_node, --algo.kl.use_loss have no effect" in note for note in notes(config))


def test_colocated_critic_and_reward_model_must_be_of_one_size():
    extra = ["--algo.advantage.estimator", "gae", "--reward.model_name_or_path", "rm", "--train.colocate_critic_reward"]
    base = {name: value for name, value in RL.items() if name != "--reward.remote_url"}
    with pytest.raises(ConfigError, match="--train.colocate_critic_reward needs groups of one size"):
        check_rl(built("train_ppo_ray", base, *extra, "--critic.num_gpus_per_node", "2"))
    check_rl(built("train_ppo_ray", base, *extra))
    # Without a critic or a reward model there is nothing to place.
    check_rl(built("train_ppo_ray", RL, "--train.colocate_critic_reward", "--critic.num_gpus_per_node", "2"))


@pytest.mark.parametrize("group", ["vllm", "ds"])
def test_sleep_without_colocation_is_refused(group):
    message = refusal(rl, f"--{group}.enable_sleep")
    assert f"--{group}.enable_sleep" in message and "--train.colocate_all" in message
    rl(f"--{group}.enable_sleep", "--train.colocate_all")


# Schedule


def test_oversampling_needs_asynchronous_training():
    message = refusal_of_rl_alone("--rollout.vllm_generate_batch_size", "2048")
    assert "--rollout.vllm_generate_batch_size 2048" in message and "--train.async_enable" in message
    assert "less than" in refusal_of_rl_alone("--rollout.vllm_generate_batch_size", "8")
    more = ["--rollout.vllm_generate_batch_size", "2048", "--train.async_enable"]
    check_rl(built("train_ppo_ray", RL, *more))


def test_partial_rollouts_need_asynchronous_training():
    assert "needs --train.async_enable" in refusal_of_rl_alone("--train.partial_rollout_enable")


def test_engines_that_never_rest_cannot_sleep():
    message = refusal_of_rl_alone("--train.async_enable", "--vllm.enable_sleep", "--train.colocate_all")
    assert "--vllm.enable_sleep" in message and "--train.async_enable" in message


def test_asynchronous_colocation_leaves_the_engines_apart():
    extra = ["--train.colocate_all", "--train.async_enable", "--vllm.num_engines", "3"]
    check_rl(built("train_ppo_ray", RL, *extra))


# Algorithm


def test_k1_in_the_loss_is_refused():
    message = refusal(rl, "--algo.kl.use_loss")
    assert "--algo.kl.estimator k1" in message and "k2 or k3" in message
    rl("--algo.kl.use_loss", "--algo.kl.estimator", "k3")
    rl("--algo.kl.estimator", "k1")


def test_target_for_a_kl_that_is_off_is_refused():
    assert "--algo.kl.target" in refusal_of_rl_alone("--algo.kl.init_coef", "0", "--algo.kl.target", "6")


def test_rollout_correction_wants_the_whole_distribution():
    message = refusal_of_rl_alone("--algo.advantage.is_correction_enable", "--rollout.top_p", "0.9")
    assert "--rollout.top_p 0.9" in message
    check_rl(built("train_ppo_ray", RL, "--algo.advantage.is_correction_enable"))
    rl("--rollout.top_p", "0.9")


def test_overlong_buffer_must_lie_in_the_response():
    assert "--rollout.max_new_tokens" in refusal_of_rl_alone("--reward.overlong_buffer_len", "10")
    extra = ["--reward.overlong_buffer_len", "10", "--rollout.max_new_tokens", "5"]
    assert "longer than --rollout.max_new_tokens 5" in refusal_of_rl_alone(*extra)


def test_filtering_needs_groups():
    assert "--rollout.n_samples_per_prompt" in refusal_of_rl_alone("--algo.dynamic_filtering_enable")


def test_rewards_come_from_one_source():
    base = {name: value for name, value in RL.items() if name != "--reward.remote_url"}
    with pytest.raises(ConfigError, match="No reward: give --reward.remote_url"):
        check_rl(built("train_ppo_ray", base))
    assert "keep one" in refusal_of_rl_alone("--train.agent_func_path", "a.py")
    assert "(.py) or an http address, found 'reward'" in refusal(rl, "--reward.remote_url", "reward")


@pytest.mark.parametrize(
    "extra",
    [
        ["--reward.timeout", "1200"],
        ["--reward.timeout", "600", "--reward.max_retries", "5"],
        ["--train.step_timeout", "1125"],
        ["--reward.timeout", "300", "--reward.max_retries", "0", "--train.step_timeout", "100"],
    ],
)
def test_a_reward_that_hangs_must_be_given_up_before_the_step_is(extra):
    message = refusal(rl, *extra)
    assert all(flag in message for flag in ("--reward.timeout", "--reward.max_retries", "--train.step_timeout"))
    rl("--reward.timeout", "959")
    rl("--reward.timeout", "26", "--train.step_timeout", "100")


@pytest.mark.parametrize("name", [*RESERVED_ENGINE_ARGUMENTS, "data_parallel_size_local", "_api_process_count"])
def test_engine_arguments_that_the_run_relies_on_are_refused(name):
    for spelling in {name, name.replace("_", "-")}:
        message = refusal_of_rl_alone("--vllm.extra", json.dumps({"max_num_seqs": 8, spelling: None}))
        assert f"--vllm.extra must leave {spelling!r} out" in message
    check_rl(built("train_ppo_ray", RL, "--vllm.extra", '{"max_num_seqs": 8}'))


def test_engine_arguments_that_change_an_engines_gpus_or_their_sleep_are_among_them():
    names = {"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_sleep_mode"}
    names |= {"prefill_context_parallel_size", "nnodes", "distributed_executor_backend"}
    assert names <= RESERVED_ENGINE_ARGUMENTS.keys()


def test_unknown_sync_backend_is_refused():
    assert "--vllm.sync_backend must be one of auto, nccl" in refusal(rl, "--vllm.sync_backend", "mpi")


# Data


@pytest.mark.parametrize("make", [rl, sft])
@pytest.mark.parametrize(("template", "slots"), [("User: hello", 0), ("{} and {}", 2)])
def test_template_without_exactly_one_slot_is_refused(make, template, slots):
    message = refusal(make, "--data.input_template", template)
    assert "--data.input_template" in message and f"{slots} slots" in message


def test_literal_backslash_n_in_a_template_is_warned_about():
    for escape in ("\\n", "\\t"):
        (note,) = notes(rl("--data.input_template", f"User: {{}}{escape}Assistant: "))
        assert "--data.input_template" in note and f"literal {escape}" in note
    assert notes(rl("--data.input_template", "User: {}\nAssistant: ")) == []


def test_two_ways_to_render_a_prompt_are_refused():
    message = refusal(sft, "--data.input_template", "Q: {}", "--data.apply_chat_template")
    assert "--data.input_template" in message and "--data.apply_chat_template" in message
    sft("--data.apply_chat_template")


def test_missing_model_and_data_are_named():
    assert "--model.model_name_or_path is missing" in refusal(sft, "--model.model_name_or_path", "None")
    assert "--data.dataset is missing" in refusal(sft, "--data.dataset", "None")
    assert "--data.prompt_dataset is missing" in refusal(rl, "--data.prompt_dataset", " ")
    assert "--actor.model_name_or_path is missing" in refusal(rl, "--actor.model_name_or_path=")


@pytest.mark.parametrize("probs", ["0.5", "0.5,0.5,0.5", "a,b", "-1,2", "0,1", "nan,1"])
def test_mixing_weights_must_be_one_number_above_0_for_each_data_set(probs):
    assert "--data.dataset_probs" in refusal(sft, "--data.dataset", "a, b", f"--data.dataset_probs={probs}")
    sft("--data.dataset", "a, b", "--data.dataset_probs", "0.3,0.7")
    sft("--data.dataset", "a , b,", "--data.dataset_probs", "0.3,0.7")


def test_data_sets_are_counted_as_they_are_loaded(tmp_path):
    """A path that exists is one data set, commas and all; blanks and a comma at the end make no further one."""
    (tmp_path / "a,b.jsonl").write_text('{"input": "q", "output": "a"}\n')
    sft("--data.dataset", "a,b.jsonl", "--data.dataset_probs", "1")
    assert "2 numbers for 1 data sets" in refusal(sft, "--data.dataset", "a,b.jsonl", "--data.dataset_probs", "1,1")
    assert "--data.dataset is missing" in refusal(sft, "--data.dataset", " , ")


def test_evaluation_steps_need_something_to_evaluate_on():
    assert "--eval.dataset" in refusal(sft, "--eval.steps", "10")
    sft("--eval.steps", "10", "--eval.dataset", "held_out.jsonl")


def test_a_response_to_train_on_must_be_named():
    base = {name: value for name, value in SFT.items() if name != "--data.output_key"}
    with pytest.raises(ConfigError, match="--data.output_key is missing"):
        checked(built("train_sft", base))
    checked(built("train_sft", base, "--data.apply_chat_template"))
    checked(built("train_sft", base, "--model.pretrain_mode_enable"))


def test_multiturn_needs_a_chat_template_and_answers():
    assert "--data.apply_chat_template" in refusal(sft, "--data.multiturn")
    extra = ["--data.multiturn", "--data.apply_chat_template", "--model.pretrain_mode_enable"]
    assert "--model.pretrain_mode_enable" in refusal(sft, *extra)


# Training


def test_unknown_schedule_is_refused():
    assert "--lr_scheduler must be one of constant" in refusal(sft, "--lr_scheduler", "cosin")
    assert "--actor.lr_scheduler must be one of" in refusal(rl, "--actor.lr_scheduler", "cosin")


def test_schedules_are_those_that_the_backend_builds():
    from transformers.trainer_utils import SchedulerType

    from openrlhf.config.checks_training import SCHEDULERS

    assert set(SCHEDULERS) == {kind.value for kind in SchedulerType} - {"reduce_lr_on_plateau", "greedy"}


def test_checkpoints_that_hold_nothing_are_refused():
    message = refusal(sft, "--ckpt.save_steps", "5", "--ckpt.disable_ds")
    assert "--ckpt.disable_ds" in message and "--ckpt.save_hf" in message
    sft("--ckpt.save_steps", "5", "--ckpt.disable_ds", "--ckpt.save_hf")


def test_states_and_export_need_a_folder_each():
    assert "--ckpt.path and --ckpt.output_dir" in refusal(sft, "--ckpt.path", "./ckpt/")


def test_sharding_options_must_fit_each_other():
    assert "--ds.ring_attn_size 2 does not divide the 1 ranks" in refusal_of_training_alone("--ds.ring_attn_size", "2")
    assert "--ds.zero_stage 3" in refusal_of_training_alone("--ds.zpg", "2")
    assert "--ds.lora.rank" in refusal_of_training_alone("--ds.load_in_4bit")
    assert "--ckpt.load_enable" in refusal_of_training_alone("--ds.use_universal_ckpt")


def test_compiled_layers_are_refused_beside_another_compiler_and_sharded_weights():
    both = refusal_of_training_alone("--ds.torch_compile", "--ds.deepcompile")
    assert both.startswith("--ds.deepcompile has DeepSpeed count") and "take --ds.torch_compile" in both
    sharded = refusal_of_training_alone("--ds.torch_compile", "--ds.zero_stage", "3")
    assert sharded.startswith("--ds.torch_compile does not go with --ds.zero_stage 3") and "take stage 2" in sharded
    assert sft("--ds.torch_compile").ds.torch_compile


# Flags without effect


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--critic.adam.lr", "1"], "--critic.adam.lr has no effect without --algo.advantage.estimator gae."),
        (["--reward.num_nodes", "2"], "--reward.num_nodes has no effect without --reward.model_name_or_path."),
        (["--actor.muon.lr", "1"], "--actor.muon.lr has no effect without --actor.optim muon."),
        (["--ds.lora.alpha", "1"], "--ds.lora.alpha has no effect without --ds.lora.rank."),
        (["--algo.advantage.lambd", "0.9"], "--algo.advantage.lambd has no effect"),
        (["--train.max_tokens_per_gpu", "9"], "--train.max_tokens_per_gpu has no effect without"),
        (["--train.dynamic_batch_enable", "--train.micro_batch_size", "2"], "--train.micro_batch_size has no effect"),
        (["--actor.eps_clip", "0.1", "--actor.eps_clip_low_high", "0.1", "0.2"], "--actor.eps_clip has no effect"),
        (["--ckpt.save_hf"], "--ckpt.save_hf has no effect without --ckpt.save_steps."),
        (["--logger.wandb.org", "me"], "--logger.wandb.org has no effect without --logger.wandb.key."),
    ],
)
def test_flag_without_effect_is_named(extra, said):
    (note,) = notes(rl(*extra))
    assert note.startswith(said)


def test_the_value_head_is_a_matter_of_models_that_have_one():
    (note,) = notes(rl("--ds.value_head_prefix", "value"))
    assert note.startswith("--ds.value_head_prefix has no effect without a critic")
    critic = ["--ds.value_head_prefix", "value", "--algo.advantage.estimator", "gae"]
    assert notes(built("train_ppo_ray", RL, *critic)) == []


def test_a_template_for_text_that_is_trained_as_it_is_is_named():
    extra = ["--data.input_template", "Q: {}", "--model.pretrain_mode_enable"]
    (note,) = notes(sft(*extra))
    assert note.startswith("--data.input_template has no effect under --model.pretrain_mode_enable")
    assert notes(sft("--data.input_template", "Q: {}")) == []


def test_std_norm_is_a_matter_of_the_estimators_that_whiten():
    groups = ["--rollout.n_samples_per_prompt", "2", "--algo.advantage.no_std_norm", "--algo.advantage.estimator"]
    (note,) = notes(rl(*groups, "rloo"))
    assert note.startswith("--algo.advantage.no_std_norm has no effect unless --algo.advantage.estimator is one of")
    assert notes(rl(*groups, "reinforce_baseline")) == []


def test_flag_at_its_default_is_no_matter_for_a_note():
    assert notes(rl("--critic.adam.lr", "9e-6", "--ref.num_nodes", "1")) == []
