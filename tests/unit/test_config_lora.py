"""Flags of adapters and of weights in 4 bits: what does not go together is refused, what changes nothing is named."""

from __future__ import annotations

import importlib.util

import pytest

from openrlhf.config import ConfigError, notes, resolve
from openrlhf.trainer.placement import colocated_roles, role_sizes
from tests.unit.config_args import DPO, RL, RM, SFT, built, checked, make_files, rl, sft

LORA = ["--ds.lora.rank", "8"]


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch, bitsandbytes_is_found):
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("command", "base"), [("train_sft", SFT), ("train_rm", RM), ("train_dpo", DPO), ("train_ppo_ray", RL)]
)
def test_every_training_command_takes_adapters_and_four_bits(command, base):
    config = checked(built(command, base, *LORA, "--ds.lora.alpha", "32", "--ds.load_in_4bit"))
    assert not any("lora.alpha" in note or "4bit" in note for note in notes(config))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--ds.lora.rank", "-1"], "--ds.lora.rank must be 0 or more, found -1"),
        ([*LORA, "--ds.lora.alpha", "0"], "--ds.lora.alpha must be 1 or more, found 0"),
        ([*LORA, "--ds.lora.dropout", "1"], "--ds.lora.dropout must be at least 0 and below 1"),
        ([*LORA, "--ds.lora.target_modules", "all-linear", "q_proj"], "all-linear stands for all layers"),
        (["--ds.load_in_4bit"], "--ds.load_in_4bit freezes the base weights, so it needs adapters: set --ds.lora.rank"),
        ([*LORA, "--ds.load_in_4bit", "--ds.zero_stage", "3"], "does not go with --ds.zero_stage 3, .* take stage 2"),
        ([*LORA, "--ds.load_in_4bit", "--ds.torch_compile"], "--ds.torch_compile does not go with --ds.load_in_4bit"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_a_sentence(flags, said):
    with pytest.raises(ConfigError, match=said):
        sft(*flags)


def test_four_bits_name_the_package_that_is_missing(monkeypatch):
    found = importlib.util.find_spec
    missing = lambda name, *rest: None if name == "bitsandbytes" else found(name, *rest)  # noqa: E731
    monkeypatch.setattr("openrlhf.config.checks_system.find_spec", missing)
    with pytest.raises(ConfigError, match=r"needs the package bitsandbytes, .* pip install 'openrlhf\[qlora\]'"):
        sft(*LORA, "--ds.load_in_4bit")
    sft(*LORA)


def test_dropout_of_adapters_is_refused_in_rl_where_the_first_ratio_would_not_be_1():
    with pytest.raises(ConfigError, match="--ds.lora.dropout 0.1 is drawn in the update alone"):
        rl(*LORA, "--ds.lora.dropout", "0.1")
    assert sft(*LORA, "--ds.lora.dropout", "0.1").ds.lora.dropout == 0.1


def test_frozen_weights_that_would_not_come_back_from_sleep_are_refused():
    sleeping = [*LORA, "--ds.enable_sleep", "--train.colocate_all", "--vllm.num_engines", "1"]
    with pytest.raises(ConfigError, match="--ds.enable_sleep does not go with --ds.lora.rank under --ds.zero_stage 3"):
        rl(*sleeping, "--ds.zero_stage", "3")
    rl(*sleeping, "--ds.zero_stage", "2")


def test_an_actor_with_adapters_is_its_own_reference_and_flags_of_another_one_are_named():
    config = rl(*LORA, "--ref.num_gpus_per_node", "3", "--train.colocate_actor_ref")
    assert "ref" not in role_sizes(config) and colocated_roles(config) == [("actor",), ("engine",)]
    [note] = notes(config)
    assert note.startswith("--ref.num_gpus_per_node, --train.colocate_actor_ref have no effect under --ds.lora.rank: ")
    assert "ref" in role_sizes(rl())
    assert not rl(*LORA, "--algo.kl.init_coef", "0").reference_below_adapters


def test_dpo_asks_the_model_below_its_adapters_unless_another_one_is_named(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text((tmp_path / "model" / "config.json").read_text())

    def dpo(*flags):
        return resolve(checked(built("train_dpo", DPO, *LORA, *flags)))

    assert dpo().reference_below_adapters and dpo("--ref.model_name_or_path", "./model").reference_below_adapters
    assert not dpo("--ref.model_name_or_path", "./other").reference_below_adapters
    assert not dpo("--model.loss_type", "simpo").reference_below_adapters
    [note] = notes(dpo("--ref.offload"))
    assert note.startswith("--ref.offload has no effect under --ds.lora.rank: the reference is the trained model")
    assert notes(dpo("--ref.offload", "--ref.model_name_or_path", "./other")) == []


def test_settings_of_adapters_without_adapters_are_named():
    [note] = notes(sft("--ds.lora.alpha", "32", "--ds.lora.dropout", "0.1"))
    assert note.startswith("--ds.lora.alpha, --ds.lora.dropout have no effect without --ds.lora.rank")


def test_a_resumed_run_must_share_the_scale_of_its_adapters():
    assert sft().ds.adapter_flags == {"--ds.lora.rank": 0}
    assert sft(*LORA, "--ds.lora.alpha", "32").ds.adapter_flags == {
        "--ds.lora.rank": 8,
        "--ds.lora.alpha": 32,
        "--ds.lora.dropout": 0.0,
        "--ds.lora.target_modules": ["all-linear"],
        "--ds.load_in_4bit": False,
    }
