"""Command lines and YAML files become configs, in every spelling, and mistakes are named."""

from __future__ import annotations

import dataclasses
import re

import pytest

from openrlhf.config import COMMANDS, ConfigError, parse, resolve, to_flags_yaml
from openrlhf.config.flags import flags_of
from tests.unit.config_args import RL, SFT, built, with_value, words


def rl(*words: str, notes: list[str] | None = None):
    return parse("train_ppo_ray", words, note=(notes if notes is not None else []).append)


def sft(*words: str, notes: list[str] | None = None):
    return parse("train_sft", words, note=(notes if notes is not None else []).append)


def error_of(command: str, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(command, words, note=lambda text: None)
    return str(caught.value)


def write(folder, text: str) -> str:
    file = folder / "run.yaml"
    file.write_text(text)
    return str(file)


# Spellings


@pytest.mark.parametrize(
    ("command", "written", "flag", "value"),
    [
        ("train_sft", "--actor.model_name_or_path", "model.model_name_or_path", "m"),
        ("train_rm", "--actor.model_name_or_path", "model.model_name_or_path", "m"),
        ("train_dpo", "--actor.model_name_or_path", "model.model_name_or_path", "m"),
        ("train_sft", "--actor.adam.lr", "adam.lr", "0.5"),
        ("train_sft", "--actor.max_norm", "max_norm", "0.5"),
        ("train_rm", "--chosen_key", "data.chosen_key", "good"),
        ("train_dpo", "--rejected_key", "data.rejected_key", "bad"),
        ("train_rm", "--value_prefix_head", "ds.value_head_prefix", "head"),
        ("train_ppo_ray", "--value_prefix_head", "ds.value_head_prefix", "head"),
        ("serve_rm", "--value_prefix_head", "ds.value_head_prefix", "head"),
        ("train_ppo_ray", "--label_key", "data.label_key", "answer"),
        ("train_ppo_ray", "--generate_max_len", "rollout.max_new_tokens", "64"),
    ],
)
def test_another_spelling_sets_the_flag_and_is_noted(command, written, flag, value):
    notes = []
    config = parse(command, [written, value], note=notes.append)

    assert str(flags_of(COMMANDS[command])[flag].value(config)) == value
    assert notes == [f"{written} is read as --{flag}."]


def test_other_spelling_of_a_switch_works_both_ways():
    assert rl("--dynamic_filtering").algo.dynamic_filtering_enable
    notes = []
    assert not sft("--actor.no_gradient_checkpointing_enable", notes=notes).model.gradient_checkpointing_enable
    assert notes == ["--actor.no_gradient_checkpointing_enable is read as --model.no_gradient_checkpointing_enable."]


def test_actor_flags_of_rl_are_no_alias():
    notes = []
    assert rl("--actor.adam.lr", "0.5", notes=notes).actor.optimizer.adam.lr == 0.5
    assert notes == []


def test_longest_prompt_and_response_add_up_to_the_longest_row():
    notes = []
    config = rl("--prompt_max_len", "100", "--generate_max_len", "28", notes=notes)

    assert (config.data.max_len, config.rollout.max_new_tokens) == (128, 28)
    assert "--data.max_len 128" in notes[-1]


def test_longest_prompt_goes_with_the_new_name_of_the_response_too():
    assert rl("--rollout.max_new_tokens", "28", "--prompt_max_len", "100").data.max_len == 128


def test_longest_prompt_alone_is_refused():
    assert "--generate_max_len" in error_of("train_ppo_ray", "--prompt_max_len", "100")


def test_longest_prompt_beside_longest_row_is_refused():
    message = error_of("train_ppo_ray", "--prompt_max_len", "100", "--generate_max_len", "28", "--data.max_len", "128")
    assert "--prompt_max_len" in message and "--data.max_len" in message


def test_longest_prompt_is_unknown_to_commands_that_do_not_generate():
    assert "Unknown flag --prompt_max_len" in error_of("train_sft", "--prompt_max_len", "100")


def test_equals_signs_and_hyphens_are_understood():
    config = rl("--train.batch-size=16", "--local_rank=0", "--data.input-template=a=b {}\n")

    assert (config.train.batch_size, config.local_rank) == (16, 0)
    assert config.data.input_template == "a=b {}\n"


def test_switch_takes_a_truth_value_after_an_equals_sign():
    assert rl("--train.colocate_all=true").train.colocate_all
    assert not rl("--train.colocate_all", "--train.colocate_all=False").train.colocate_all
    assert rl("--train.no_colocate_all=false").train.colocate_all


def test_last_of_two_values_counts():
    assert rl("--train.batch_size", "1", "--train.batch_size", "2").train.batch_size == 2


def test_values_that_look_like_flags_or_numbers_arrive_whole():
    config = rl(
        "--reward.clip_range", "-1e3", "inf", "--data.input_template=--{}", "--actor.eps_clip_low_high", "0.2", "0.3"
    )

    assert config.reward.clip_range == (-1000.0, float("inf"))
    assert config.data.input_template == "--{}"
    assert config.actor.eps_clip_low_high == (0.2, 0.3)
    assert rl("--data.input_template", "-{}").data.input_template == "-{}"


def test_any_number_of_words_and_json_objects_are_values():
    config = rl("--ds.lora.target_modules", "q_proj", "v_proj", "--vllm.extra", '{"max_num_seqs": 4, "x": {"y": [1]}}')

    assert config.ds.lora.target_modules == ("q_proj", "v_proj")
    assert config.vllm.extra == {"max_num_seqs": 4, "x": {"y": [1]}}


# Mistakes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--train.batchsize", "3"], ["Unknown flag --train.batchsize", "--train.batch_size"]),
        (["--micro_batch_size", "3"], ["--train.micro_batch_size", "--rollout.micro_batch_size"]),
        (["--train.batch_size", "3.5"], ["--train.batch_size", "whole number", "'3.5'"]),
        (["--actor.adam.lr", "fast"], ["--actor.adam.lr", "a number", "'fast'"]),
        (["--actor.adam.betas", "0.9"], ["--actor.adam.betas", "2 values"]),
        (["--train.batch_size"], ["--train.batch_size needs a value"]),
        (["--data.input_key", "--train.seed", "1"], ["--data.input_key needs a value", "--data.input_key=VALUE"]),
        (["--train.batch_size", "3", "4"], ["'4' follows --train.batch_size", "one value"]),
        (["--train.colocate_all", "yes"], ["'yes' follows --train.colocate_all", "no value"]),
        (["--train.colocate_all=yes"], ["true or false", "'yes'"]),
        (["--algo.advantage.estimator", "ppo"], ["must be one of", "reinforce_baseline", "'ppo'"]),
        (["--train.no_batch_size", "3"], ["Unknown flag --train.no_batch_size"]),
        (["--vllm.extra", "[1]"], ["--vllm.extra", "JSON object"]),
        (["--vllm.extra", "{"], ["--vllm.extra", "JSON object"]),
        (["-x"], ["'-x' is not a flag"]),
        (["--config", "a.yaml", "--config", "b.yaml"], ["--config is given twice"]),
        (["--config", "missing.yaml"], ["missing.yaml", "cannot be read"]),
    ],
)
def test_a_mistake_is_named_in_one_sentence(words, said):
    message = error_of("train_ppo_ray", *words)

    assert all(part in message for part in said), message
    assert "\n" not in message


# YAML


def test_yaml_gives_defaults_that_flags_override(tmp_path):
    file = write(tmp_path, "train:\n  batch_size: 16\n  seed: 7\nrollout.batch_size: 32\n")
    config = rl("--train.batch_size", "8", "--config", file)

    assert (config.train.batch_size, config.train.seed, config.rollout.batch_size) == (8, 7, 32)
    assert config.config == file


def test_yaml_true_is_unset_by_the_negative_flag(tmp_path):
    file = write(tmp_path, "train.colocate_all: true\nds:\n  no_packing_samples: true\n")

    assert rl("--config", file).train.colocate_all
    assert not rl("--config", file, "--train.no_colocate_all").train.colocate_all
    assert not rl("--config", file).ds.packing_samples
    assert rl("--config", file, "--ds.packing_samples").ds.packing_samples


def test_yaml_values_of_every_kind_arrive(tmp_path):
    file = write(
        tmp_path,
        "actor:\n  adam: {lr: 1e-6, betas: [0.8, 0.9]}\n  eps_clip_low_high: null\n"
        "ds.lora.target_modules: [q_proj, v_proj]\nckpt.max_mem: .inf\nvllm: {extra: {max_num_seqs: 4}}\n"
        'data: {input_template: "User: {}\\n"}\nlogger: {wandb: {run_name: 2026-01-01}}\nreward:\n',
    )
    config = rl("--config", file)

    assert config.actor.optimizer.adam.lr == 1e-6
    assert config.actor.optimizer.adam.betas == (0.8, 0.9)
    assert config.actor.eps_clip_low_high is None
    assert config.ds.lora.target_modules == ("q_proj", "v_proj")
    assert config.ckpt.max_mem == float("inf")
    assert config.vllm.extra == {"max_num_seqs": 4}
    assert config.data.input_template == "User: {}\n"
    assert config.logger.wandb.run_name == "2026-01-01"


def test_yaml_knows_the_same_spellings(tmp_path):
    notes = []
    file = write(tmp_path, "prompt_max_len: 100\ngenerate_max_len: 28\nlabel_key: answer\n")
    config = rl("--config", file, notes=notes)
    assert (config.data.max_len, config.data.label_key) == (128, "answer")
    assert any("label_key" in note and file in note for note in notes)

    assert rl("--config", file, "--generate_max_len", "30").data.max_len == 130
    assert rl("--config", file, "--data.max_len", "200").data.max_len == 200

    file = write(tmp_path, "actor:\n  model_name_or_path: m\n  adam: {lr: 0.5}\n")
    config = sft("--config", file)
    assert (config.model.model_name_or_path, config.optimizer.adam.lr) == ("m", 0.5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train:\n  batchsize: 3\n", ["run.yaml: train.batchsize", "--train.batch_size"]),
        ("trian:\n  batch_size: 3\n", ["run.yaml: trian"]),
        ("train.batch_size: many\n", ["run.yaml: train.batch_size", "whole number", "'many'"]),
        ("train.batch_size: [1, 2]\n", ["run.yaml: train.batch_size", "one value"]),
        ("train.batch_size: null\n", ["run.yaml: train.batch_size"]),
        ("train.batch_size: true\n", ["run.yaml: train.batch_size", "True"]),
        ("train.colocate_all: 1\n", ["run.yaml: train.colocate_all", "true or false"]),
        ("actor.adam.betas: 0.9\n", ["run.yaml: actor.adam.betas", "a list of 2"]),
        ("actor.adam.betas: [0.9, 0.9, 0.9]\n", ["run.yaml: actor.adam.betas", "2 values"]),
        ("train.batch_size: 3\ntrain:\n  batch_size: 3\n", ["run.yaml: train.batch_size", "same flag"]),
        ("label_key: a\ndata.label_key: b\n", ["run.yaml: data.label_key", "label_key"]),
        ("train.seed: 1\ntrain.seed: 2\n", ["run.yaml", "line 2", "train.seed", "twice"]),
        ("config: other.yaml\n", ["run.yaml: config"]),
        ("- 1\n", ["run.yaml", "list"]),
        ("a: [\n", ["run.yaml", "not valid YAML"]),
    ],
)
def test_a_mistake_in_yaml_names_file_and_key(tmp_path, text, said):
    message = error_of("train_ppo_ray", "--config", write(tmp_path, text))

    assert all(part in message for part in said), message
    assert "\n" not in message


def test_empty_yaml_changes_nothing(tmp_path):
    file = write(tmp_path, "# nothing\n")
    assert dataclasses.replace(sft("--config", file), config=None) == sft()


@pytest.mark.parametrize("command", COMMANDS)
def test_resolved_config_comes_back_from_its_yaml(command, tmp_path):
    config = resolve(parse(command, []))
    file = write(tmp_path, to_flags_yaml(config))

    assert dataclasses.replace(parse(command, ["--config", file]), config=None) == config


def test_changed_config_comes_back_from_its_yaml(tmp_path):
    given = rl(
        "--actor.muon.no_nesterov", "--vllm.extra", '{"a": [1, null]}', "--data.input_template", "ü {}\n: #",
        "--data.label_key", "on",
        "--actor.eps_clip_low_high", "0.1", "0.3", "--logger.wandb.run_name", "007", "--train.dynamic_batch_enable",
        "--ds.lora.target_modules", "a", "b", "--data.prompt_probs", "0.5,0.5", "--ckpt.max_mem", "1e3",
    )  # fmt: skip
    config = resolve(given)
    file = write(tmp_path, to_flags_yaml(config))

    assert dataclasses.replace(rl("--config", file), config=None) == config


# Flags whose names say that their values open something: keys of data columns and metrics do not.
SECRET_NAME = re.compile(r"(^|[._])(token|password|secret|credentials|(api|wandb\.|access)_?key)$")


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_secret_is_marked_and_never_written(command):
    flags = flags_of(COMMANDS[command])
    secret = [flag for flag in flags.values() if flag.secret is not None]
    assert {flag.name for flag in secret} == {name for name in flags if SECRET_NAME.search(name)}
    config = COMMANDS[command]()
    for flag in secret:
        config = with_value(config, flag, f"hidden {flag.name}")
    assert "hidden" not in to_flags_yaml(config)
    for flag in secret:
        for word in flag.secret.plain:
            assert f"{flag.name.rpartition('.')[2]}: {word}\n" in to_flags_yaml(with_value(config, flag, word))


def test_a_word_that_tells_nothing_is_kept_and_comes_back(tmp_path):
    config = resolve(sft("--logger.wandb.key", "offline"))
    file = write(tmp_path, to_flags_yaml(config))
    assert dataclasses.replace(sft("--config", file), config=None) == config


def test_resolving_fills_what_was_left_open_and_nothing_else():
    config = resolve(rl("--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "500"))
    assert config.algo.loss_aggregation == "token_mean"
    assert config.rollout.max_tokens_per_gpu == 500
    assert resolve(rl("--rollout.max_tokens_per_gpu", "9")).rollout.max_tokens_per_gpu == 9

    assert resolve(sft("--data.apply_chat_template")).data.input_template is None
    assert resolve(sft()).data.input_template == "User: {}\nAssistant: "
    assert resolve(config) == config


def test_notes_are_printed_by_one_rank_only(monkeypatch, capsys):
    parse("train_rm", ["--chosen_key", "c"])
    assert capsys.readouterr().err == "note: --chosen_key is read as --data.chosen_key.\n"

    monkeypatch.setenv("RANK", "1")
    parse("train_rm", ["--chosen_key", "c"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("command", "base"), [("train_ppo_ray", RL), ("train_sft", SFT)])
def test_configs_that_other_tests_build_are_those_that_parsing_gives(command, base):
    extra = ["--ds.no_packing_samples", "--ds.lora.target_modules", "a", "b", "--ds.grad_accum_dtype", "None"]
    assert built(command, base, *extra) == parse(command, words(base, *extra))
