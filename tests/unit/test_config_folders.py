"""What a run writes never lands in the folder of a model that it reads."""

from __future__ import annotations

import pytest

from openrlhf.config import ConfigError
from openrlhf.config.checks_training import check_checkpoints
from tests.unit.config_args import SFT, built, make_files, rl, sft

OWNERS = [
    ("train_sft", "model"),
    ("train_ppo_ray", "actor"),
    ("train_ppo_ray", "critic"),
    ("train_ppo_ray", "reward"),
    ("train_rm", "model"),
    ("train_dpo", "model"),
    ("train_dpo", "ref"),
]


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    make_files(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "model", target_is_directory=True)
    (tmp_path / "model" / "inner").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    monkeypatch.chdir(tmp_path)


def refusal(command: str, *extra: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_checkpoints(built(command, {}, *extra))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("command", "owner"), OWNERS)
@pytest.mark.parametrize("flag", ["--ckpt.output_dir", "--ckpt.path"])
@pytest.mark.parametrize(
    ("model", "written", "where"),
    [
        ("./model", "model", "is the folder of"),
        ("model/", "../{cwd}/model", "is the folder of"),
        ("./link", "./model", "is the folder of"),
        ("./model", "./link", "is the folder of"),
        ("./model", "model/new/sft", "lies inside of"),
        ("./model", "./link/new", "lies inside of"),
        ("./link", "{abs}/model/new", "lies inside of"),
    ],
)
def test_writing_into_the_folder_of_a_model_is_refused(command, owner, flag, model, written, where, tmp_path):
    written = written.format(cwd=tmp_path.name, abs=tmp_path)
    message = refusal(command, f"--{owner}.model_name_or_path", model, flag, written)
    assert message.startswith(f"{flag} {written} {where} the model that --{owner}.model_name_or_path {model} names")


@pytest.mark.parametrize("make", [sft, rl])
@pytest.mark.parametrize("written", ["./model2", "./modelx/out", ".", "./model/inner/out"])
def test_writing_beside_a_model_or_above_it_is_no_harm(make, written):
    make("--ckpt.output_dir", written)


def test_a_name_of_the_hub_is_no_folder():
    check_checkpoints(built("train_sft", SFT, "--model.model_name_or_path", "ckpt/name", "--ckpt.output_dir", "ckpt"))


@pytest.mark.parametrize("command", ["train_sft", "train_ppo_ray", "train_rm", "train_dpo"])
@pytest.mark.parametrize("flag", ["--ckpt.output_dir", "--ckpt.path"])
@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_folder_name_is_refused(command, flag, value):
    assert refusal(command, flag, value).startswith(f"{flag} is empty; name a folder")
