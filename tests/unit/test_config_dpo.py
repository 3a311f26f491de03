"""Flags of DPO that change nothing are named, and those that mean something are not."""

from __future__ import annotations

import pytest

from openrlhf.algorithms.preference_loss import PREFERENCE_LOSSES, REFERENCE_FREE, SMOOTHED_LOSSES
from openrlhf.config import COMMANDS, DPOModelConfig, notes, resolve
from openrlhf.config.checks_training import SMOOTHED_LOSSES as SMOOTHED_BY_FLAG
from openrlhf.config.flags import flags_of
from tests.unit.config_args import DPO, built, checked, make_files


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)


def dpo(*extra: str):
    return checked(built("train_dpo", DPO, *extra))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--ref.precompute", "--model.loss_type", "simpo"],
            "--ref.precompute has no effect without a loss that looks",
        ),
        (["--ref.offload", "--ref.precompute"], "--ref.offload has no effect under --ref.precompute"),
        (["--ref.offload", "--ds.zero_stage", "3"], "--ref.offload has no effect under --ds.zero_stage 3"),
        (["--model.ipo_sum_enable"], "--model.ipo_sum_enable has no effect without --model.ipo_enable"),
        (
            ["--model.kto_desirable_weight", "2"],
            "--model.kto_desirable_weight has no effect without --model.loss_type kto",
        ),
        (["--model.simpo_gamma", "1"], "--model.simpo_gamma has no effect without --model.loss_type simpo"),
    ],
)
def test_a_flag_without_effect_is_named(flags, said):
    (note,) = notes(dpo(*flags))
    assert note.startswith(said)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--ref.offload"],
        ["--ref.precompute", "--ref.model_name_or_path", "./model"],
        ["--model.ipo_enable", "--model.ipo_sum_enable"],
        ["--model.ipo_enable", "--model.loss_type", "ipo"],
        ["--model.loss_type", "simpo", "--model.simpo_gamma", "1", "--model.label_smoothing", "0.1"],
        ["--model.loss_type", "kto", "--ref.offload", "--model.kto_undesirable_weight", "1.3"],
        ["--model.label_smoothing", "0.1", "--model.nll_loss_coef", "0.2"],
    ],
)
def test_flags_that_mean_something_together_pass_without_a_word(flags):
    assert notes(dpo(*flags)) == []


def test_the_losses_of_the_flags_are_those_of_the_algorithms():
    choices = set(flags_of(COMMANDS["train_dpo"])["model.loss_type"].choices)
    assert choices == set(PREFERENCE_LOSSES)
    assert set(SMOOTHED_BY_FLAG) == set(SMOOTHED_LOSSES)
    without = {name for name in choices if not DPOModelConfig(loss_type=name).has_reference}
    assert without == set(REFERENCE_FREE)


def test_the_old_flag_of_ipo_and_the_loss_type_are_one():
    assert DPOModelConfig(ipo_enable=True).loss == DPOModelConfig(loss_type="ipo").loss == "ipo"


def test_the_path_of_the_reference_holds_wherever_a_rank_stands(tmp_path):
    config = resolve(dpo("--ref.model_name_or_path", "./model"))
    assert config.ref.model_name_or_path == str(tmp_path / "model")
