"""What loading adds to transformers."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from openrlhf.config import ConfigError
from openrlhf.models.loading import load_causal_lm, load_tokenizer
from tests.tiny_models import make_tiny_model, make_tokenizer


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model can be loaded from .*nowhere"):
        load_causal_lm(tmp_path / "nowhere", dtype=torch.float32, device="cpu")


def test_a_model_that_is_no_language_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ConfigError, match="holds a vit"):
        load_causal_lm(tmp_path, dtype=torch.float32, device="cpu")


def test_weights_are_loaded_in_the_dtype_that_was_asked_for_and_rotary_frequencies_stay_exact(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen2")
    model = load_causal_lm(folder, dtype=torch.bfloat16, device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_a_tokenizer_keeps_its_own_pad_token_and_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_tiny_model(tmp_path, "qwen2"))
    assert tokenizer.pad_token == "<pad>" and tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False).startswith("<|im_start|>")


def test_a_chat_template_that_is_given_takes_the_place_of_the_tokenizers_own(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path, chat_template="{{ messages[0]['content'] }}!")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"


@pytest.mark.parametrize(("spare", "chosen"), [("<|reserved_special_token_0|>", None), (None, "<|im_end|>")])
def test_a_missing_pad_token_becomes_a_reserved_one_else_eos_and_that_is_said(
    tmp_path: Path, spare: str | None, chosen: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    # "<pad>" itself stays in the vocabulary, so it has to be hidden for the case without a spare token.
    if spare:
        tokenizer.add_tokens([spare], special_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    if not spare:
        for path in tmp_path.iterdir():
            path.write_text(path.read_text().replace("<pad>", "<nil>"))
    with caplog.at_level(logging.WARNING, logger="openrlhf"):
        loaded = load_tokenizer(tmp_path)
    assert loaded.pad_token == (chosen or "<pad>")
    assert "no pad token" in caplog.text
