"""What loading adds to transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast

from openrlhf.config import ConfigError
from openrlhf.data.packed_batch import pack_rows
from openrlhf.models.forward import score_tokens
from openrlhf.models.loading import context_length, keep_pad_apart, load_causal_lm, load_tokenizer
from tests.tiny_models import CHAT_TEMPLATE, END, make_tiny_model, make_tiny_moe, make_tokenizer, tiny_config


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model can be loaded from .*nowhere"):
        load_causal_lm(tmp_path / "nowhere", dtype=torch.float32, device="cpu")


def spoiled(folder: Path, file: str, **changes: object) -> Path:
    """A tiny model, one of whose JSON files has other entries."""
    path = make_tiny_model(folder) / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def own_code(folder: Path) -> Path:
    """A tiny model that wants to run Python of its own."""
    return spoiled(folder, "config.json", model_type="mine", auto_map={"AutoConfig": "conf.MyConfig"})


def without(folder: Path, pattern: str) -> Path:
    """A tiny model without some of its files."""
    for path in make_tiny_model(folder).glob(pattern):
        path.unlink()
    return folder


def cut(folder: Path, file: str) -> Path:
    """A tiny model, one of whose files is half there."""
    path = make_tiny_model(folder) / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return folder


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: "no-such-owner/no-such-model", "couldn't find them in the cached files"),
        (lambda folder: cut(folder, "config.json"), "not a valid JSON file"),
        (lambda folder: spoiled(folder, "config.json", model_type="frobnicate"), "model type `frobnicate`"),
        (own_code, "runs only where --trust_remote_code allows it"),
        (lambda folder: without(folder, "*.safetensors"), "no file named model.safetensors"),
        (lambda folder: cut(folder, "model.safetensors"), "incomplete metadata"),
    ],
)
def test_a_model_that_cannot_be_read_is_named_in_one_sentence(tmp_path: Path, make: Any, said: str) -> None:
    path = make(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_causal_lm(path, dtype=torch.float32, device="cpu")
    message = str(caught.value)
    assert message.startswith(f"no model can be loaded from {path}: ") and said in message and "\n" not in message


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: "no-such-owner/no-such-model", "couldn't find them in the cached files"),
        (lambda folder: folder / "nowhere", "there is no such folder"),
        (lambda folder: cut(folder, "tokenizer.json"), "JSONDecodeError"),
        (lambda folder: without(folder, "*token*"), "its vocabulary is empty"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_named_in_one_sentence(tmp_path: Path, make: Any, said: str) -> None:
    path = make(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(path)
    message = str(caught.value)
    assert message.startswith(f"no tokenizer can be loaded from {path}: ") and said in message and "\n" not in message


@pytest.mark.parametrize(
    ("architecture", "changes", "context"),
    [
        ("qwen2", {}, 2048),
        ("qwen2", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, 4096),
        (
            "qwen2",
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
            4096,
        ),
        # Its length is the stretched one already.
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 1e4,
                    "factor": 8.0,
                    "original_max_position_embeddings": 256,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                }
            },
            2048,
        ),
        ("gemma3", {}, 2048),
    ],
)
def test_the_context_counts_stretched_positions(architecture: str, changes: dict[str, Any], context: int) -> None:
    assert context_length(tiny_config(architecture, **changes)) == context


def test_a_model_without_positions_has_no_bound_and_other_names_of_the_length_are_known() -> None:
    assert context_length(AutoConfig.for_model("mamba")) is None
    assert context_length(AutoConfig.for_model("gpt2", n_positions=77)) == 77


@pytest.mark.parametrize("name", ["model.layers.0.mlp.down_proj.weight", "lm_head.weight"])
def test_weights_that_the_files_lack_are_named_and_never_drawn_at_random(tmp_path: Path, name: str) -> None:
    folder = make_tiny_model(tmp_path / "model", tie=False)
    weights = load_file(folder / "model.safetensors")
    save_file({key: value for key, value in weights.items() if key != name}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"lack weights .*{name}"):
        load_causal_lm(folder, dtype=torch.float32, device="cpu")


def test_a_model_that_is_no_language_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ConfigError, match="holds a vit"):
        load_causal_lm(tmp_path, dtype=torch.float32, device="cpu")


def test_weights_are_loaded_in_the_dtype_that_was_asked_for_and_rotary_frequencies_stay_exact(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen2")
    model = load_causal_lm(folder, dtype=torch.bfloat16, device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_every_kernel_for_experts_gives_the_same_log_probs_and_gradients(tmp_path: Path) -> None:
    folder = make_tiny_moe(tmp_path)
    rows = [torch.arange(3, 3 + length) * 37 % 512 for length in (7, 11, 5)]
    batch = pack_rows(rows, [torch.arange(row.numel()) > 0 for row in rows])
    found = {}
    for kernel in ("eager", "batched_mm", "grouped_mm"):
        model = load_causal_lm(folder, dtype=torch.float32, device="cpu", experts_implementation=kernel)
        assert model.config._experts_implementation == kernel
        logprobs = score_tokens(model, batch).logprobs
        logprobs.sum().backward()
        found[kernel] = [logprobs.detach(), *(parameter.grad for parameter in model.parameters())]
    for kernel in ("batched_mm", "grouped_mm"):
        torch.testing.assert_close(found[kernel], found["eager"], rtol=1e-4, atol=1e-4)


def test_a_kernel_for_experts_that_the_model_does_not_take_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match="does not support setting experts implementation"):
        load_causal_lm(folder, dtype=torch.float32, device="cpu", experts_implementation="grouped_mm")


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


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pad_token": "<pad>"}, "<pad>"),
        # One that is made for padding, one that no text of the chat template holds, and one that ends no row.
        ({"additional_special_tokens": ["<|image_pad|>", "<|other|>"]}, "<|image_pad|>"),
        ({"additional_special_tokens": ["<|im_start|>", "<|other|>"]}, "<|other|>"),
        ({"bos_token": "<|im_start|>"}, "<|im_start|>"),
        ({"unk_token": "<unk>"}, "<unk>"),
    ],
)
def test_padding_is_told_from_the_end_of_a_row_by_a_token_that_ends_none(changes: dict, expected: str) -> None:
    letters = Tokenizer(models.BPE({letter: i for i, letter in enumerate("onetw ")}, []))
    tokenizer = PreTrainedTokenizerFast(**{"tokenizer_object": letters, "eos_token": END, "pad_token": END, **changes})
    tokenizer.chat_template = CHAT_TEMPLATE
    assert keep_pad_apart(tokenizer, [tokenizer.eos_token_id, None])
    assert tokenizer.pad_token == expected and tokenizer.eos_token == END


def test_a_tokenizer_whose_only_special_tokens_end_rows_keeps_its_padding() -> None:
    letters = Tokenizer(models.BPE({letter: i for i, letter in enumerate("onetw ")}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<a>", pad_token="<b>")
    assert not keep_pad_apart(tokenizer, [tokenizer.pad_token_id])
    assert tokenizer.pad_token == "<b>"
