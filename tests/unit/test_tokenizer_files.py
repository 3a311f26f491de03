"""The tokenizer beside an exported model has the files that it came with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import AutoTokenizer

from openrlhf.models.loading import load_tokenizer
from openrlhf.models.tokenizer_files import save_tokenizer
from tests.tiny_models import CHAT_TEMPLATE, make_tokenizer, tiny_config


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def _as_others_write_it(folder: Path) -> Path:
    """Files such as older programs wrote them: other spaces, a template and a map of tokens of their own."""
    make_tokenizer().save_pretrained(folder)
    rules = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(rules, indent=1))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").unlink()
    settings |= {"chat_template": CHAT_TEMPLATE, "legacy": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=3) + "\n")
    (folder / "special_tokens_map.json").write_text('{"eos_token":   "<|im_end|>"}')
    (folder / "README.md").write_text("not a file of the tokenizer")
    return folder


def test_files_of_a_tokenizer_that_nothing_changed_are_exported_byte_for_byte(tmp_path: Path) -> None:
    source = _as_others_write_it(tmp_path / "source")
    tokenizer = load_tokenizer(source)
    # A call leaves its padding and truncation in what transformers would write.
    tokenizer(["a", "b c d e"], padding=True, truncation=True, max_length=3)
    target = tmp_path / "target"
    target.mkdir()
    (target / "model.safetensors").write_bytes(b"weights")
    (target / "chat_template.jinja").write_text("of an earlier export")
    save_tokenizer(tokenizer, target)
    expected = _contents(source)
    del expected["README.md"]
    assert _contents(target) == expected | {"model.safetensors": b"weights"}
    messages = [{"role": "user", "content": "hi"}]
    reloaded = AutoTokenizer.from_pretrained(target)
    assert reloaded.apply_chat_template(messages) == tokenizer.apply_chat_template(messages)


def test_the_own_code_of_a_tokenizer_comes_along(tmp_path: Path) -> None:
    source = _as_others_write_it(tmp_path / "source")
    (source / "own_tokenizer.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\nclass OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own_tokenizer.OwnTokenizer"]}}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    save_tokenizer(load_tokenizer(source, trust_remote_code=True), tmp_path / "target")
    reloaded = AutoTokenizer.from_pretrained(tmp_path / "target", trust_remote_code=True)
    assert type(reloaded).__name__ == "OwnTokenizer" and reloaded("ab")["input_ids"]


def test_a_tokenizer_of_the_hub_is_exported_from_its_cache_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "a" * 40
    repository = tmp_path / "hub" / "models--some--model"
    source = _as_others_write_it(repository / "snapshots" / commit)
    tiny_config().save_pretrained(source)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    save_tokenizer(load_tokenizer("some/model"), tmp_path / "target")
    expected = _contents(source)
    del expected["README.md"], expected["config.json"]
    assert _contents(tmp_path / "target") == expected


@pytest.mark.parametrize("change", ["template", "pad"])
def test_a_change_is_written_and_the_rules_of_the_tokenizer_stay_byte_for_byte(tmp_path: Path, change: str) -> None:
    source = _as_others_write_it(tmp_path / "source")
    template = "{{ messages[0]['content'] }}!" if change == "template" else None
    tokenizer = load_tokenizer(source, chat_template=template)
    if change == "pad":
        tokenizer.pad_token = "<|im_start|>"
    save_tokenizer(tokenizer, tmp_path / "target")
    reloaded = AutoTokenizer.from_pretrained(tmp_path / "target")
    assert reloaded.pad_token == tokenizer.pad_token and reloaded.chat_template == tokenizer.chat_template
    assert (tmp_path / "target" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    text = "hello world <|im_end|> 1 + 2"
    assert reloaded(text).input_ids == tokenizer(text).input_ids


def test_new_tokens_are_written(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_as_others_write_it(tmp_path / "source"))
    tokenizer.add_tokens(["<|new|>"], special_tokens=True)
    save_tokenizer(tokenizer, tmp_path / "target")
    reloaded = AutoTokenizer.from_pretrained(tmp_path / "target")
    assert reloaded.convert_tokens_to_ids("<|new|>") == tokenizer.convert_tokens_to_ids("<|new|>")


def test_a_tokenizer_whose_source_is_gone_is_still_written(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.name_or_path = str(tmp_path / "gone")
    save_tokenizer(tokenizer, tmp_path / "target")
    assert AutoTokenizer.from_pretrained(tmp_path / "target").get_vocab() == tokenizer.get_vocab()


def test_what_cannot_be_written_is_an_error_of_the_operating_system(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError):
        save_tokenizer(make_tokenizer(), tmp_path / "file")
