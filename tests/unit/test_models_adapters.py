"""Adapters in a model: where they are put, what they change, what is saved, and what is merged."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, MambaConfig

from openrlhf.config import ConfigError, LoraConfig
from openrlhf.models.adapters import (
    ADAPTER_WEIGHTS,
    NAME,
    adapter_layers,
    adapter_size,
    adapters_off,
    attach_adapters,
    has_adapters,
    linear_size,
    plain_weights,
    save_adapter,
    target_modules,
)
from openrlhf.models.forward import last_token_scores, score_tokens, score_values
from openrlhf.models.value_head import HeadSpec
from tests.adapter_models import LORA, TOKENS, load, logits, merged, moved, ragged_batch, trained
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "tied": make_tiny_model(folder / "tied", "qwen2"),
        "untied": make_tiny_model(folder / "untied", "qwen3", tie=False),
    }


def test_adapters_change_nothing_at_first_and_are_all_that_can_be_trained(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        model, plain = load(folder), load(folder, None)
        assert has_adapters(model) and not has_adapters(plain) and adapter_layers(plain) == {}
        assert torch.equal(logits(model, TOKENS), logits(plain, TOKENS))
        # Seven linear layers in each of two decoder layers, two matrices each.
        assert len(trained(model)) == 28 and all(".lora_" in name for name in trained(model))


def test_every_rank_draws_the_same_adapters_and_training_goes_on_with_the_same_random_numbers(
    folders: dict[str, Path],
) -> None:
    model = load(folders["tied"], None)
    name = "model.layers.0.mlp.up_proj.lora_A.default.weight"
    drawn = []
    for state, seed in ((1, 5), (2, 5), (2, 6)):
        copied = copy.deepcopy(model)
        torch.manual_seed(state)
        attach_adapters(copied, LORA, base="here", seed=seed, dtype=torch.float32)
        drawn.append((trained(copied), torch.rand(1)))
    assert all(torch.equal(tensor, drawn[1][0][name]) for name, tensor in drawn[0][0].items())
    assert not torch.equal(drawn[1][0][name], drawn[2][0][name])
    torch.manual_seed(2)
    assert torch.equal(drawn[1][1], torch.rand(1))


def test_the_model_without_its_adapters_is_the_one_that_was_loaded_to_the_last_bit(folders: dict[str, Path]) -> None:
    batch = ragged_batch()
    model, plain = moved(load(folders["tied"])), load(folders["tied"], None)
    expected = score_tokens(plain, batch).logprobs
    with adapters_off(model):
        assert torch.equal(score_tokens(model, batch).logprobs, expected)
    assert not torch.allclose(score_tokens(model, batch).logprobs, expected, atol=1e-3)
    assert len(trained(model)) == 28
    with pytest.raises(TypeError, match="no adapters"), adapters_off(plain):
        pass


def test_merged_weights_under_plain_names_make_the_model_with_adapters_and_leave_the_live_ones_alone(
    folders: dict[str, Path],
) -> None:
    for kind, folder in folders.items():
        model = moved(load(folder))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        weights = merged(model)
        assert sorted(weights) == sorted(name for name, _ in plain.named_parameters()), kind
        plain.load_state_dict(weights, strict=False)
        assert (logits(plain, TOKENS) - logits(model, TOKENS)).abs().max() < 1e-5
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_merged_weight_is_what_is_written_out_by_hand_in_the_dtype_of_the_weight() -> None:
    # RB38
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(2, 2, bias=False)})])})
    config = peft.LoraConfig(r=1, lora_alpha=2, target_modules=["layers.0.q_proj"])
    model.to(torch.bfloat16)
    model = peft.inject_adapter_in_model(config, model, NAME)
    layer = adapter_layers(model)["layers.0.q_proj"]
    with torch.no_grad():
        layer.base_layer.weight.copy_(torch.eye(2))
        layer.lora_A[NAME].weight.copy_(torch.tensor([[1.0, 2.0]]))
        layer.lora_B[NAME].weight.copy_(torch.tensor([[0.5], [-0.5]]))
    [weight] = plain_weights(model)
    assert weight.name == "layers.0.q_proj.weight" and weight.tensor().dtype == torch.bfloat16
    assert weight.tensor().tolist() == [[2.0, 2.0], [-1.0, -1.0]]


def test_a_saved_adapter_makes_the_same_model_in_plain_transformers_and_peft(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    lora = replace(LORA, target_modules=("q_proj", "down_proj"))
    model = moved(load(folders["untied"], lora))
    save_adapter(model, trained(model), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folders["untied"])
    assert (config["task_type"], config["r"], config["lora_alpha"]) == ("CAUSAL_LM", 4, 8)
    assert config["modules_to_save"] is None
    assert config["target_modules"] == sorted(adapter_layers(model))
    # transformers finds the base by itself.
    found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert (logits(found, TOKENS) - logits(model, TOKENS)).abs().max() < 1e-5
    base = AutoModelForCausalLM.from_pretrained(folders["untied"], dtype=torch.float32)
    again = peft.PeftModel.from_pretrained(base, tmp_path)
    assert (logits(again, TOKENS) - logits(model, TOKENS)).abs().max() < 1e-5
    assert (logits(again.merge_and_unload(), TOKENS) - logits(model, TOKENS)).abs().max() < 1e-5


def test_rewards_are_the_same_before_saving_after_loading_and_after_merging(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    # RB36
    head = HeadSpec(fresh=True, seed=3, pad_token_id=0)
    model = moved(load(folders["tied"], head=head))
    assert "score.weight" in trained(model) and trained(model)["score.weight"].shape == (1, 64)
    with torch.no_grad():
        model.score.weight.mul_(2.0)
    save_adapter(model, trained(model), tmp_path)
    saved = load_file(tmp_path / ADAPTER_WEIGHTS)
    assert saved["base_model.model.score.weight"].shape == (1, 64)
    assert json.loads((tmp_path / "config.json").read_text())["mean"] == 0
    assert json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"] == ["score"]
    batch = ragged_batch()
    rows = batch.tokens.split(batch.lengths.tolist())
    ours = last_token_scores(score_values(model, batch), batch.cu_seqlens)
    base = AutoModelForSequenceClassification.from_pretrained(folders["tied"], num_labels=1, dtype=torch.float32)
    again = peft.PeftModel.from_pretrained(base, tmp_path)
    for stage in (again, again.merge_and_unload()):
        stage.config.pad_token_id = None
        theirs = torch.stack([logits(stage, row)[0, 0] for row in rows])
        assert (theirs - ours).abs().max() < 1e-5


def test_names_that_fit_no_linear_layer_are_refused_with_those_that_would(folders: dict[str, Path]) -> None:
    model = load(folders["tied"], None)
    for name, said in {
        "q_prj": "no module of this Qwen2ForCausalLM has that name; its linear layers are called down_proj, gate_proj,",
        "lm_head": "lm_head is the head",
        "embed_tokens": "model.embed_tokens is a Embedding",
        "self_attn": "self_attn is a Qwen2Attention",
    }.items():
        with pytest.raises(ConfigError, match=f"--ds.lora.target_modules {name}: .*{said}"):
            target_modules(model, LoraConfig(rank=4, target_modules=("q_proj", name)))
    one = LoraConfig(rank=4, target_modules=("layers.1.mlp.up_proj",))
    assert target_modules(model, one) == ["model.layers.1.mlp.up_proj"]
    headed = load(folders["tied"], None, head=HeadSpec(fresh=True))
    assert len(target_modules(headed, LORA)) == 14 and "score" not in target_modules(headed, LORA)


def test_a_rank_above_every_side_of_the_layers_is_refused(folders: dict[str, Path]) -> None:
    model = load(folders["tied"], None)
    widest = max(min(module.weight.shape) for name, module in model.named_modules() if name.endswith("_proj"))
    assert adapter_size(model, LoraConfig(rank=widest)) > 0
    with pytest.raises(ConfigError, match=f"--ds.lora.rank {widest + 1} is above {widest}, the smaller side"):
        adapter_size(model, LoraConfig(rank=widest + 1))
    with pytest.raises(ConfigError, match="--ds.lora.rank .* is above"):
        attach_adapters(model, LoraConfig(rank=widest + 1), base="here", seed=1, dtype=torch.float32)


def test_layers_whose_weights_kernels_read_past_an_adapter_get_none() -> None:
    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)
    model = AutoModelForCausalLM.from_config(config)
    assert sorted(name.rpartition(".")[2] for name in target_modules(model, LORA)) == ["in_proj", "x_proj"]
    with pytest.raises(ConfigError, match="out_proj is read by a kernel past its adapter"):
        target_modules(model, LoraConfig(rank=4, target_modules=("out_proj",)))
    attach_adapters(model, LORA, base="here", seed=1, dtype=torch.float32)
    assert len(adapter_layers(model)) == 2


def test_the_plan_knows_how_many_parameters_adapters_have_without_making_them(folders: dict[str, Path]) -> None:
    model = load(folders["tied"])
    plain = load(folders["tied"], None)
    assert adapter_size(plain, LORA) == sum(tensor.numel() for tensor in trained(model).values())
    assert linear_size(plain) == sum(
        module.weight.numel() for name, module in plain.named_modules() if name.endswith("_proj")
    )


def test_dropout_of_adapters_is_drawn_in_training_alone_and_the_models_own_is_off(folders: dict[str, Path]) -> None:
    model = moved(load(folders["tied"], replace(LORA, dropout=0.5)))
    assert torch.equal(logits(model, TOKENS), logits(model, TOKENS))
    model.train()
    assert not torch.allclose(logits(model, TOKENS), logits(model, TOKENS))
