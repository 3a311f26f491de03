"""The reward server's flags: what is refused before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openrlhf.cli.common import prepare
from openrlhf.config import ConfigError, check, notes, parse
from openrlhf.config.api_keys import client_key, server_key
from tests.unit.config_args import make_files, rl


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "rm"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(parse("serve_rm", [*words, "--device", "cpu"]))
    return str(caught.value)


def test_a_served_model_is_named_whole_and_one(model: str, tmp_path: Path) -> None:
    assert "--reward.model_name_or_path is missing" in refused()
    assert "a server serves one model" in refused("--reward.model_name_or_path", f"{model},{model}")
    assert "there is no config.json in it" in refused("--reward.model_name_or_path", str(tmp_path / "none"))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "base"}))
    assert "holds an adapter (adapter_config.json) of base" in refused("--reward.model_name_or_path", str(adapter))
    check(parse("serve_rm", ["--reward.model_name_or_path", model, "--device", "cpu"]))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--port", "0"], "--port must be between 1 and 65535"),
        (["--max_batch_tokens", "0"], "--max_batch_tokens must be 1 or more"),
        (["--stop_timeout", "-1"], "--stop_timeout must be above 0"),
        (["--ds.load_in_4bit"], "--ds.load_in_4bit"),
        (["--api_key_file", "none.txt"], "--api_key_file none.txt: cannot be read"),
        (["--api_key_env", "NO_SUCH_KEY"], "--api_key_env NO_SUCH_KEY must hold a key"),
        (["--api_key_env", "A", "--api_key_file", "b"], "both name a key; keep one"),
    ],
)
def test_a_flag_that_cannot_be_used_is_refused_by_name(words: list[str], sentence: str, model: str) -> None:
    assert sentence in refused("--reward.model_name_or_path", model, *words)


def test_what_the_device_cannot_do_is_refused_before_anything_is_loaded(model: str, monkeypatch) -> None:
    words = ["--reward.model_name_or_path", model]
    with pytest.raises(ConfigError, match="torch_varlen needs a GPU"):
        prepare("serve_rm", [*words, "--device", "cpu", "--ds.attn_implementation", "torch_varlen"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="this machine shows no NVIDIA GPU"):
        prepare("serve_rm", [*words, "--device", "cuda"])


@pytest.mark.parametrize("content", ["", " \n", "two words", "schlüssel", "a\x00b"])
def test_a_key_that_no_header_can_carry_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(content)
    with pytest.raises(ConfigError, match="must hold a key of visible ASCII characters"):
        server_key(str(tmp_path / "key"), None)


def test_a_key_comes_from_a_file_or_a_variable_without_its_line_end(tmp_path, monkeypatch) -> None:
    (tmp_path / "key").write_text("sesame\n")
    monkeypatch.setenv("REWARD_KEY", "sesame")
    assert server_key(str(tmp_path / "key"), None) == server_key(None, "REWARD_KEY") == "sesame"
    assert client_key("REWARD_KEY") == "sesame" and server_key(None, None) is client_key(None) is None


def test_rl_that_is_to_send_a_key_is_refused_without_one(monkeypatch, tmp_path) -> None:
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    server = ["--reward.remote_url", "http://127.0.0.1:5000/get_reward", "--reward.api_key_env", "REWARD_KEY"]
    monkeypatch.delenv("REWARD_KEY", raising=False)
    with pytest.raises(ConfigError, match="--reward.api_key_env REWARD_KEY must hold a key"):
        check(rl(*server))
    monkeypatch.setenv("REWARD_KEY", "sesame")
    check(rl(*server))
    assert notes(rl("--reward.api_key_env", "REWARD_KEY")) == [
        "--reward.api_key_env has no effect without the address of a server in --reward.remote_url."
    ]


def test_a_server_that_everyone_can_reach_without_a_key_is_pointed_out(model: str) -> None:
    def said(*words: str) -> list[str]:
        return notes(parse("serve_rm", ["--reward.model_name_or_path", model, *words]))

    assert said() == said("--host", "localhost") == said("--host", "0.0.0.0", "--api_key_env", "KEY") == []
    assert said("--host", "0.0.0.0") == [
        "--host 0.0.0.0 opens the server to the network, and no key is asked for (--api_key_file)."
    ]
