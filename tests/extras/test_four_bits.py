"""Adapters over weights in 4 bits: what is packed, what is merged, what moves, and what a stopped run finds again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BioGptConfig

from openrlhf.config import ConfigError
from openrlhf.models.four_bit import is_four_bit, whole_numel
from tests.adapter_models import (
    LORA,
    TOKENS,
    assert_same_answers_with_a_gradient,
    load,
    logits,
    merged,
    moved,
    ragged_batch,
    trained,
)
from tests.integration import backend_worker as worker
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tied", "qwen2", tie=True)


@pytest.fixture(scope="module")
def four_bit(folder: Path) -> Any:
    return moved(load(folder, load_in_4bit=True))


def test_four_bit_loading_packs_the_linear_layers_and_leaves_heads_and_adapters_as_they_are(four_bit: Any) -> None:
    packed = [name for name, item in four_bit.named_parameters() if is_four_bit(item)]
    assert len(packed) == 14 and all(name.endswith("_proj.base_layer.weight") for name in packed)
    assert four_bit.lm_head.weight is four_bit.model.embed_tokens.weight
    assert {tensor.dtype for tensor in trained(four_bit).values()} == {torch.float32}
    assert whole_numel(four_bit.get_parameter(packed[0])) == 64 * 64


def test_merged_weights_over_four_bits_make_the_model_with_adapters(four_bit: Any, folder: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = merged(four_bit)
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        name: item.shape for name, item in plain.named_parameters()
    }
    plain.load_state_dict(weights, strict=False)
    assert (logits(plain, TOKENS) - logits(four_bit, TOKENS)).abs().max() < 1e-4


def test_four_bit_weights_answer_alike_with_and_without_a_gradient(four_bit: Any) -> None:
    assert_same_answers_with_a_gradient(four_bit, ragged_batch(), 1e-6)


def test_heads_of_other_names_stay_whole_or_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = BioGptConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    whole = load(tmp_path, load_in_4bit=True)
    assert not is_four_bit(whole.get_output_embeddings().weight)
    monkeypatch.setattr("openrlhf.models.four_bit._HEADS", ("lm_head",))
    with pytest.raises(ConfigError, match="--ds.load_in_4bit: the output head of .*, a BioGptForCausalLM, has none of"):
        load(tmp_path, load_in_4bit=True)


def _make(folder: Path, stage: int, **options: Any) -> Any:
    return worker.make_backend(folder, stage, lora=LORA, seed=42, load_in_4bit=True, **options)


def _over_four_bits(folder: Path) -> None:
    for stage, dtype in ((2, "bf16"), (0, "fp32")):
        backend = _make(folder, stage, dtype=dtype)
        packed = {name: item for name, item in backend.module.named_parameters() if is_four_bit(item)}
        assert len(packed) == 14
        frozen = {name: item.clone() for name, item in backend.module.named_parameters() if not item.requires_grad}
        before = worker.full_weights(backend)
        found = worker.train_with_backend(backend, range(worker.STEPS))
        assert found["losses"][-1] < found["losses"][0] + 0.1 and backend.unmoved_parameters() == []
        now = dict(backend.module.named_parameters())
        assert all(torch.equal(now[name], item) for name, item in frozen.items())
        after = worker.full_weights(backend)
        moved = {name for name in after if not torch.equal(after[name], before[name])}
        assert moved == {name.replace(".base_layer", "") for name in packed}


def test_steps_over_four_bit_weights_move_the_adapters_and_not_a_bit_below_them(folder: Path) -> None:
    worker.run_ranks(_over_four_bits, 2, folder)


def _stop_and_resume(folder: Path, out: Path) -> None:
    whole = _make(folder, 2)
    worker.train_with_backend(whole, range(2))
    whole.save_checkpoint(out / "global_step2", {"step": 2})
    went_on = worker.train_with_backend(whole, range(2, 3))
    resumed = _make(folder, 2)
    assert resumed.load_checkpoint(out / "global_step2") == {"step": 2}
    assert worker.train_with_backend(resumed, range(2, 3)) == went_on
    weights = worker.full_weights(whole)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in worker.full_weights(resumed).items())


def test_a_run_over_four_bit_weights_resumes_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    worker.run_ranks(_stop_and_resume, 1, folder, tmp_path)
