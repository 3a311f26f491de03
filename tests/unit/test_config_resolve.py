"""What a run is told about its folders and its name before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf.config import parse, resolve, to_flags_yaml
from openrlhf.config.flags import flags_of

COMMANDS = ["train_sft", "train_ppo_ray"]


def _resolved(command: str, *words: str, earlier: str | None = None, out: Path | None = None):
    if earlier is not None and out is not None:
        out.mkdir(exist_ok=True)
        (out / "config.yaml").write_text(earlier)
    return resolve(parse(command, [*words, *([] if out is None else ["--ckpt.output_dir", str(out)])]))


@pytest.mark.parametrize("command", COMMANDS)
def test_folders_are_absolute_the_current_one_too(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    owner = "actor" if command == "train_ppo_ray" else "model"
    model = f"--{owner}.model_name_or_path"
    config = _resolved(command, "--ckpt.output_dir", ".", "--ckpt.path", "states", model, "model")
    assert config.ckpt.output_dir == str(tmp_path) and config.ckpt.path == str(tmp_path / "states")
    assert getattr(config, owner).model_name_or_path == str(tmp_path / "model")
    # A hub name stays one.
    assert getattr(_resolved(command, model, "some/model"), owner).model_name_or_path == "some/model"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_resumed_run_keeps_the_name_that_it_began_with(command: str, tmp_path: Path) -> None:
    earlier = to_flags_yaml(_resolved(command, "--logger.wandb.run_name", "first"))
    resumed = _resolved(command, "--ckpt.load_enable", earlier=earlier, out=tmp_path)
    assert resumed.logger.wandb.run_name == "first"
    named = _resolved(command, "--ckpt.load_enable", "--logger.wandb.run_name", "second", earlier=earlier, out=tmp_path)
    assert named.logger.wandb.run_name == "second"
    assert _resolved(command, earlier=earlier, out=tmp_path).logger.wandb.run_name.startswith(command)


@pytest.mark.parametrize("left", ["", "logger:\n  wandb: {run_na", "logger: 1\n", "logger:\n  wandb:\n    key: null\n"])
def test_half_a_file_of_settings_costs_the_name_alone(left: str, tmp_path: Path) -> None:
    config = _resolved("train_sft", "--ckpt.load_enable", earlier=left, out=tmp_path)
    assert config.logger.wandb.run_name.startswith("train_sft_")


@pytest.mark.parametrize("flag", ["reward.remote_url", "train.agent_func_path"])
def test_an_empty_text_unsets_a_users_file(flag: str) -> None:
    config = _resolved("train_ppo_ray", f"--{flag}", "")
    assert flags_of(type(config))[flag].value(config) is None
