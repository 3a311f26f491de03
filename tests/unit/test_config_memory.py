"""Optimizer and memory flags that cannot go together, each refused in one sentence."""

from __future__ import annotations

import pytest

from openrlhf.config import ConfigError, check
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


def test_settings_of_muon_are_told_where_a_critic_has_adam():
    critic = ["--algo.advantage.estimator", "gae", "--critic.muon.lr", "0.1"]
    (note,) = notes(rl(*critic))
    assert note == "--critic.muon.lr has no effect without --critic.optim muon."
    assert notes(rl(*critic, "--critic.optim", "muon")) == []
