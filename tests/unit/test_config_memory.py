"""Optimizer and memory flags that cannot go together, each refused in one sentence."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from openrlhf.config import ConfigError, check, check_device, device_notes
from openrlhf.config.notes import notes
from tests.unit.config_args import SFT, built, make_files, rl, sft


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)


def refusal(*extra: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(built("train_sft", SFT, *extra))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_state_with_muon_is_not_converted_for_another_number_of_ranks():
    said = refusal("--optim", "muon", "--ckpt.load_enable", "--ds.use_universal_ckpt")
    assert said.startswith("--ds.use_universal_ckpt does not go with --optim muon")
    assert sft("--optim", "muon", "--ckpt.load_enable").optimizer.optim == "muon"


@pytest.mark.parametrize("stage", ["0", "1", "3"])
def test_gradients_are_reduced_beside_the_backward_on_stage_2_alone(stage):
    said = refusal("--ds.overlap_comm", "--ds.zero_stage", stage)
    assert said.startswith(f"--ds.overlap_comm works with --ds.zero_stage 2 alone, found {stage}")
    assert sft("--ds.overlap_comm", "--ds.zero_stage", "2").ds.overlap_comm


def test_gradients_are_added_up_in_a_type_that_fits_the_weights():
    assert refusal("--ds.grad_accum_dtype", "fp16") == "--ds.grad_accum_dtype must be fp32 or bf16, found 'fp16'."
    assert "fp32 weights" in refusal("--ds.grad_accum_dtype", "bf16", "--ds.param_dtype", "fp32")
    assert sft("--ds.grad_accum_dtype", "bf16").ds.grad_accum_dtype == "bf16"
    assert sft("--ds.grad_accum_dtype", "fp32", "--ds.param_dtype", "fp32").ds.grad_accum_dtype == "fp32"


def test_a_second_shard_group_needs_stage_3_and_divides_the_ranks_of_every_trained_model(monkeypatch):
    assert "needs --ds.zero_stage 3" in refusal("--ds.zpg", "2")
    assert "does not divide the 1 ranks from the launcher" in refusal("--ds.zpg", "2", "--ds.zero_stage", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert sft("--ds.zpg", "2", "--ds.zero_stage", "3").ds.zpg == 2
    models = ["--ds.zero_stage", "3", "--ds.zpg", "2", "--actor.num_gpus_per_node", "2"]
    critic = ["--algo.advantage.estimator", "gae", "--critic.num_gpus_per_node", "3"]
    assert rl(*models).ds.zpg == 2
    with pytest.raises(ConfigError, match="does not divide the 3 ranks from --critic.num_nodes"):
        rl(*models, *critic)


def test_what_moves_nothing_on_a_cpu_is_named_by_every_command():
    (note,) = device_notes(sft("--ds.adam_offload", "--ds.overlap_comm", "--ds.zero_stage", "2"), "cpu")
    assert note == "no effect on the CPU: --ds.adam_offload, --ds.overlap_comm."
    assert device_notes(sft("--ds.adam_offload"), "cuda") == []
    (note,) = notes(sft("--ds.adam_offload", "--ds.zero_stage", "0", "--ds.param_dtype", "fp32"))
    assert note == "--ds.adam_offload has no effect under --ds.zero_stage 0 in fp32."


def test_kernels_of_liger_have_to_be_installed_and_run_on_gpus():
    config = built("train_sft", SFT, "--ds.use_liger_kernel")
    with pytest.raises(ConfigError, match="needs a GPU, and the device is the CPU"):
        check_device(config, "cpu")
    check_device(config, "cuda")
    if find_spec("liger_kernel") is None:
        assert refusal("--ds.use_liger_kernel") == (
            "--ds.use_liger_kernel needs the package liger-kernel; pip install 'openrlhf[liger]'."
        )


def test_settings_of_muon_are_told_where_a_critic_has_adam():
    critic = ["--algo.advantage.estimator", "gae", "--critic.muon.lr", "0.1"]
    (note,) = notes(rl(*critic))
    assert note == "--critic.muon.lr has no effect without --critic.optim muon."
    assert notes(rl(*critic, "--critic.optim", "muon")) == []
