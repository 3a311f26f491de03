"""A merged model answers as base and adapter together, in plain transformers."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from openrlhf.models.adapter_files import read_adapter
from openrlhf.models.loading import load_causal_lm, load_tokenizer
from openrlhf.models.merging import merge
from openrlhf.models.value_head import HeadSpec
from tests.tiny_models import make_tokenizer
from tests.unit.adapter_folders import IDS, LINEAR, QUERY, causal_adapter, combine, logits_of, reward_adapter, rewards

# Name, base, whether input and output embeddings of the result are one, and the adapter.
CASES = [
    ("all_linear", "tied", True, LINEAR),
    ("untied", "untied", False, LINEAR),
    ("experts", "moe", False, LINEAR),
    ("fused_experts", "moe", False, {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    ("dora", "tied", True, LINEAR | {"use_dora": True}),
    ("ranks", "untied", False, LINEAR | {"use_rslora": True, "rank_pattern": {"q_proj": 2}}),
    ("biases", "tied", True, LINEAR | {"bias": "all"}),
    ("trained_embeddings", "tied", False, QUERY | {"modules_to_save": ["embed_tokens"]}),
    ("both_trained", "tied", False, QUERY | {"modules_to_save": ["embed_tokens", "lm_head"]}),
    ("trained_as_one", "tied", True, QUERY | {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    ("trained_tokens", "tied", True, QUERY | {"trainable_token_indices": [5, 17]}),
    ("trained_tokens_untied", "untied", False, QUERY | {"trainable_token_indices": [5, 17]}),
    ("low_rank_embeddings", "tied", False, {"target_modules": ["q_proj", "embed_tokens"]}),
    ("low_rank_ends", "tied", False, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    ("low_rank_as_one", "tied", True, {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}),
    ("new_tokens", "tied", True, QUERY | {"rows": 600}),
    ("new_tokens_untied", "untied", False, QUERY | {"rows": 600}),
    ("fewer_tokens", "untied", False, QUERY | {"rows": 500, "modules_to_save": ["embed_tokens", "lm_head"]}),
    ("new_tokens_trained", "tied", False, QUERY | {"rows": 600, "modules_to_save": ["embed_tokens", "lm_head"]}),
    ("new_tokens_alone", "tied", True, QUERY | {"rows": 600, "trainable_token_indices": [17, 599]}),
    ("new_tokens_low_rank", "untied", False, {"target_modules": ["embed_tokens", "lm_head"], "rows": 600}),
]


@pytest.mark.parametrize(("name", "base", "one", "lora"), CASES, ids=[case[0] for case in CASES])
def test_a_merged_model_has_the_logits_of_base_and_adapter(name, base, one, lora, bases, tmp_path):
    adapter = causal_adapter(bases[base], tmp_path / name, **lora)
    combine(adapter, tmp_path / "merged", base=bases[base])

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        logits = merged(input_ids=IDS).logits
    torch.testing.assert_close(logits, logits_of(adapter), atol=2e-5, rtol=0)
    assert merged.config.tie_word_embeddings is one
    assert (merged.lm_head.weight.data_ptr() == merged.model.embed_tokens.weight.data_ptr()) is one
    assert not any("lora" in key or "base_layer" in key for key in merged.state_dict())
    assert merged.config.vocab_size == lora.get("rows", 512)


def test_what_a_model_keeps_in_float32_stays_so(bases, tmp_path):
    adapter = causal_adapter(bases["tied"], tmp_path / "adapter", **LINEAR)
    model = AutoModelForCausalLM.from_pretrained(bases["tied"], dtype=torch.bfloat16)
    model.model.norm.float()
    model.model.layers[0].mlp.register_buffer("correction", torch.tensor([1 / 3]))
    merged = merge(model, read_adapter(adapter), torch.bfloat16).model
    assert merged.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
    assert merged.norm.weight.dtype == torch.float32
    assert torch.equal(merged.layers[0].mlp.correction, torch.tensor([1 / 3]))


def test_each_sum_is_computed_in_float32_and_rounded_once(bases, tmp_path):
    adapter = causal_adapter(bases["bf16"], tmp_path / "adapter", target_modules=["q_proj"], lora_alpha=8)
    combine(adapter, tmp_path / "merged", base=bases["bf16"], dtype="bf16")

    name = "model.layers.1.self_attn.q_proj"
    lora = load_file(adapter / "adapter_model.safetensors")
    a, b = (lora[f"base_model.model.{name}.lora_{side}.weight"].float() for side in "AB")
    before = load_file(bases["bf16"] / "model.safetensors")
    after = load_file(tmp_path / "merged" / "model.safetensors")
    torch.testing.assert_close(
        after[f"{name}.weight"], (before[f"{name}.weight"].float() + 2.0 * b @ a).bfloat16(), atol=0, rtol=0
    )
    torch.testing.assert_close(after["model.norm.weight"], before["model.norm.weight"], atol=0, rtol=0)
    assert {weight.dtype for weight in after.values()} == {torch.bfloat16}


def test_the_tokenizer_is_the_adapters_byte_by_byte_or_else_the_bases(bases, tmp_path):
    plain = causal_adapter(bases["tied"], tmp_path / "plain", **QUERY)
    own = causal_adapter(bases["tied"], tmp_path / "own", tokenizer=True, **QUERY)
    text = (own / "tokenizer_config.json").read_text()
    (own / "tokenizer_config.json").write_text(text.replace('"model_max_length": 2048', '"model_max_length": 99'))
    combine(plain, tmp_path / "a", base=bases["tied"])
    combine(own, tmp_path / "b", base=bases["tied"])

    for merged, source in (("a", bases["tied"]), ("b", own)):
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (tmp_path / merged / file).read_bytes() == (source / file).read_bytes()
    assert load_tokenizer(tmp_path / "b").model_max_length == 99


def test_a_merged_model_is_read_by_our_own_loader_and_keeps_its_generation_config(bases, tmp_path):
    adapter = causal_adapter(bases["tied"], tmp_path / "adapter", **LINEAR)
    combine(adapter, tmp_path / "merged", base=bases["tied"])

    model = load_causal_lm(tmp_path / "merged", dtype=torch.float32, device="cpu")
    assert model.generation_config.temperature == 0.7
    assert sorted(path.name for path in (tmp_path / "merged").iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip


def test_the_adapter_names_its_base_where_no_flag_does(bases, query, tmp_path):
    said = combine(query, tmp_path / "merged")
    assert said[0] == f"--model_path: {bases['tied']}, which the adapter names as its base"

    copied = shutil.copytree(bases["tied"], tmp_path / "other")
    said = combine(query, tmp_path / "again", base=copied)
    assert said[0] == f"the adapter names {bases['tied']} as its base; merging it into {copied}"


@pytest.mark.parametrize("name", ["score", "value_head"])
def test_rb36_rewards_after_reload_and_merge_are_those_before_and_the_head_is_scalar(name, bases, tmp_path):
    before = reward_adapter(bases["tied"], tmp_path / "adapter", name=name)
    if name == "score":
        plain = AutoModelForSequenceClassification.from_pretrained(bases["tied"], num_labels=1)
        again = rewards(PeftModel.from_pretrained(plain, tmp_path / "adapter").eval())
        torch.testing.assert_close(again, before, atol=1e-5, rtol=0)
    combine(tmp_path / "adapter", tmp_path / "merged", "--is_rm", base=bases["tied"])

    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert list(merged.score.weight.shape) == [1, 64]
    assert (merged.config.num_labels, merged.config.value_head_prefix) == (1, "score")
    torch.testing.assert_close(rewards(merged), before, atol=1e-4, rtol=0)
    ours = load_causal_lm(tmp_path / "merged", dtype=torch.float32, device="cpu", head=HeadSpec())
    torch.testing.assert_close(ours.score.weight, merged.score.weight, atol=0, rtol=0)


def test_statistics_of_rewards_come_from_the_adapters_training_or_else_from_the_base(bases, tmp_path):
    base = shutil.copytree(bases["tied"], tmp_path / "base")
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(settings | {"mean": 0.5, "std": 2.0}))
    reward_adapter(base, tmp_path / "adapter")
    combine(tmp_path / "adapter", tmp_path / "of_base", "--is_rm", base=base)
    (tmp_path / "adapter/config.json").write_text(json.dumps({"mean": -1.5, "std": 3.0}))
    combine(tmp_path / "adapter", tmp_path / "of_adapter", "--is_rm", base=base)

    for folder, expected in (("of_base", (0.5, 2.0)), ("of_adapter", (-1.5, 3.0))):
        saved = json.loads((tmp_path / folder / "config.json").read_text())
        assert (saved["mean"], saved["std"]) == expected


def test_a_reward_model_whose_head_was_not_trained_keeps_the_head_of_its_base(bases, tmp_path):
    reward_adapter(bases["tied"], tmp_path / "first")
    combine(tmp_path / "first", tmp_path / "base", "--is_rm", base=bases["tied"])
    before = reward_adapter(tmp_path / "base", tmp_path / "second", head=False)
    combine(tmp_path / "second", tmp_path / "merged", "--is_rm", base=tmp_path / "base")

    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(rewards(merged), before, atol=1e-4, rtol=0)


def test_a_merged_reward_model_pads_with_a_token_that_ends_no_row(bases, tmp_path):
    base = shutil.copytree(bases["tied"], tmp_path / "base")
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(base)
    reward_adapter(base, tmp_path / "adapter")
    combine(tmp_path / "adapter", tmp_path / "merged", "--is_rm", base=base)

    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    saved = load_tokenizer(tmp_path / "merged")
    assert saved.pad_token_id != saved.eos_token_id
    assert merged.config.pad_token_id == saved.pad_token_id
