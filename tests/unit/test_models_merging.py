"""A merged model answers as base and adapter together, in plain transformers; what cannot be merged is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from openrlhf.cli.lora_combiner import main
from openrlhf.config import ConfigError, check, parse
from openrlhf.models.loading import load_causal_lm, load_tokenizer
from openrlhf.models.merging import merge_folders
from openrlhf.models.value_head import HeadSpec
from openrlhf.utils.errors import RunError
from tests.tiny_models import make_tiny_model, make_tiny_moe, make_tokenizer

IDS = torch.tensor([[5, 499, 17, 40, 41, 260, 77, 3, 3, 90]])
LINEAR = {"target_modules": "all-linear"}
QUERY = {"target_modules": ["q_proj"]}


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {
        "tied": make_tiny_model(root / "tied"),
        "untied": make_tiny_model(root / "untied", tie=False, seed=1),
        "bf16": make_tiny_model(root / "bf16", dtype=torch.bfloat16),
        "moe": make_tiny_moe(root / "moe"),
        "wide": make_tiny_model(root / "wide", hidden=128),
    }


def trained(model, seed: int = 3):
    """Returns: the model whose trainable weights have moved, as after some training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model.eval()


def causal_adapter(base: Path, folder: Path, *, rows: int | None = None, tokenizer: bool = False, **lora) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base)
    if rows is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model.resize_token_embeddings(rows)
    model = trained(get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, **lora})))
    model.save_pretrained(folder)
    with torch.no_grad():
        torch.save(model(input_ids=IDS).logits, folder.parent / f"{folder.name}.logits")
    if tokenizer:
        make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(bases, tmp_path_factory) -> Path:
    return causal_adapter(bases["tied"], tmp_path_factory.mktemp("saved") / "adapter", **QUERY)


@pytest.fixture
def query(saved, tmp_path) -> Path:
    """An adapter of the tied base that a test may change."""
    return shutil.copytree(saved, tmp_path / "adapter")


def logits_of(folder: Path) -> torch.Tensor:
    return torch.load(folder.parent / f"{folder.name}.logits")


def combine(adapter: Path, output: Path, *extra: str, base: Path | None = None, dtype: str = "fp32") -> list[str]:
    said: list[str] = []
    words = ["--lora_path", str(adapter), "--output_path", str(output), "--ds.param_dtype", dtype, *extra]
    config = parse("lora_combiner", words + (["--model_path", str(base)] if base else []))
    check(config)
    merge_folders(config, said.append)
    return said


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


def reward_adapter(
    base: Path, folder: Path, *, name: str = "score", head: bool = True, labels: int = 1
) -> torch.Tensor:
    """Writes the adapter of a reward model, whose head it holds under ``name``.

    Returns: float32 [3], the rewards of three texts.
    """
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels)
    lora = LoraConfig(task_type="SEQ_CLS" if head else None, r=4, **LINEAR, exclude_modules=["score"])
    model = trained(get_peft_model(model, lora))
    model.save_pretrained(folder)
    if name != "score":
        file = folder / "adapter_model.safetensors"
        save_file({key.replace(".score.", f".{name}."): value for key, value in load_file(file).items()}, file)
        settings = json.loads((folder / "adapter_config.json").read_text())
        settings["modules_to_save"] = [name]
        (folder / "adapter_config.json").write_text(json.dumps(settings))
    return rewards(model)


def rewards(model) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(input_ids=IDS[:, :length]).logits.flatten() for length in (3, 6, 10)])


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


def edited(adapter: Path, **changes) -> Path:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return adapter


def rewritten(adapter: Path, change) -> Path:
    file = adapter / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    return adapter


def pickled(adapter: Path) -> Path:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    return adapter


def first_replaced(weights: dict[str, torch.Tensor], value: torch.Tensor | None) -> dict[str, torch.Tensor]:
    name = min(weights)
    rest = {key: weight for key, weight in weights.items() if key != name}
    return rest if value is None else rest | {name: value}


BAD_ADAPTERS = [
    (lambda a: a / "nowhere", "there is no such folder"),
    (lambda a: a.parent, "is not an adapter: there is no adapter_config.json in it"),
    (lambda a: edited(a, peft_type="IA3"), "an adapter of the type IA3; only LoRA is merged"),
    (lambda a: edited(a, task_type="TOKEN_CLS"), "an adapter for the task TOKEN_CLS"),
    (lambda a: edited(a, task_type="SEQ_CLS"), "the adapter of a reward model .*add --is_rm"),
    (lambda a: edited(a, alora_invocation_tokens=[1, 2]), "cannot be merged: it acts from some token on"),
    (lambda a: edited(a, target_modules=["w_proj"]), "does not fit its base: Target modules .*w_proj.* not found"),
    (lambda a: edited(a, target_modules=["q_proj", "v_proj"]), "lacks weights that its adapter_config.json promises"),
    (lambda a: edited(a, modules_to_save=["lm_head"]), "does not fit its base: adapter_config.json names what"),
    (lambda a: edited(a, r="four"), "does not"),
    (lambda a: pickled(a), "adapter_model.bin, a pickle"),
    (lambda a: rewritten(a, lambda w: first_replaced(w, None)), "lacks weights that its adapter_config.json promises"),
    (lambda a: rewritten(a, lambda w: w | {"base_model.model.x.lora_A.weight": torch.ones(4, 4)}), "has no place for"),
    (lambda a: rewritten(a, lambda w: first_replaced(w, torch.full((4, 64), torch.nan))), "no finite numbers"),
    (lambda a: rewritten(a, lambda w: first_replaced(w, torch.ones(0))), "without being gathered"),
    (lambda a: rewritten(a, lambda w: {"x": torch.ones(2)}), "holds no weights of LoRA matrices"),
]


@pytest.mark.parametrize(("spoil", "said"), BAD_ADAPTERS, ids=[said for _, said in BAD_ADAPTERS])
def test_an_adapter_that_cannot_be_merged_is_refused_in_one_sentence(spoil, said, bases, query, tmp_path):
    adapter = spoil(query)
    with pytest.raises(ConfigError, match=said) as caught:
        combine(adapter, tmp_path / "merged", base=bases["tied"])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "merged").exists()


def test_an_adapter_of_another_kind_that_peft_wrote_is_refused_by_its_type(bases, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(bases["tied"])
    get_peft_model(model, IA3Config(task_type="CAUSAL_LM")).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match="type IA3; only LoRA"):
        combine(tmp_path / "adapter", tmp_path / "merged", base=bases["tied"])


def test_a_base_of_other_shapes_is_refused_with_both_shapes(bases, query, tmp_path):
    with pytest.raises(ConfigError, match=r"q_proj.* is \[\d+, 64\] in the adapter, and the base takes \[\d+, 128\]"):
        combine(query, tmp_path / "merged", base=bases["wide"])


def test_new_embeddings_that_the_adapter_does_not_hold_are_refused(bases, tmp_path):
    adapter = causal_adapter(bases["untied"], tmp_path / "adapter", rows=600, **QUERY)
    rewritten(adapter, lambda weights: {name: weight for name, weight in weights.items() if "lm_head" not in name})
    with pytest.raises(ConfigError, match="trained on 600 embeddings, .* has 512, and the adapter does not hold"):
        combine(adapter, tmp_path / "merged", base=bases["untied"])


def test_is_rm_and_the_adapter_have_to_agree(bases, tmp_path):
    causal = causal_adapter(bases["tied"], tmp_path / "causal", **QUERY)
    with pytest.raises(ConfigError, match="--is_rm: .* is the adapter of a language model"):
        combine(causal, tmp_path / "merged", "--is_rm", base=bases["tied"])
    edited(causal, task_type=None)
    with pytest.raises(ConfigError, match="no scalar head .*; the adapter .* holds no head either"):
        combine(causal, tmp_path / "merged", "--is_rm", base=bases["tied"])
    reward_adapter(bases["tied"], tmp_path / "reward")
    edited(tmp_path / "reward", task_type=None)
    with pytest.raises(ConfigError, match="it holds the scalar head score.; add --is_rm"):
        combine(tmp_path / "reward", tmp_path / "merged", base=bases["tied"])
    reward_adapter(bases["tied"], tmp_path / "labels", labels=2)
    with pytest.raises(ConfigError, match=r"score.weight of .* has the shape \[2, 64\].*\[1, 64\]"):
        combine(tmp_path / "labels", tmp_path / "merged", "--is_rm", base=bases["tied"])


def test_a_base_that_is_no_model_is_refused(bases, query, tmp_path):
    with pytest.raises(ConfigError, match="no model can be loaded from .*nowhere: there is no such folder"):
        combine(query, tmp_path / "merged", base=tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds an adapter"):
        combine(query, tmp_path / "merged", base=query)
    quantised = shutil.copytree(bases["tied"], tmp_path / "quantised")
    settings = json.loads((quantised / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (quantised / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"holds quantised weights \(gptq\)"):
        combine(query, tmp_path / "merged", base=quantised)


def test_weights_beyond_the_number_format_are_refused(bases, tmp_path):
    adapter = causal_adapter(bases["tied"], tmp_path / "adapter", lora_alpha=2**28, **QUERY)
    with pytest.raises(ConfigError, match="no finite numbers in fp16: take --ds.param_dtype bf16"):
        combine(adapter, tmp_path / "merged", base=bases["tied"], dtype="fp16")


def test_a_folder_that_is_an_input_or_not_empty_is_not_written_to(bases, query, tmp_path):
    for output, said in (
        (query, "is the folder of --lora_path, which is to stay"),
        (bases["tied"] / "..", "is not empty"),
        (bases["tied"] / "config.json", "is a file, not a folder"),
        (tmp_path / "adapter" / ".." / "adapter", "is the folder of --lora_path"),
    ):
        with pytest.raises(ConfigError, match=said):
            combine(query, output, base=bases["tied"])


def test_what_a_killed_run_left_is_taken_away(bases, query, tmp_path):
    (tmp_path / "merged/.partial").mkdir(parents=True)
    (tmp_path / "merged/.partial/model-00001-of-00003.safetensors").write_bytes(b"half")
    combine(query, tmp_path / "merged", base=bases["tied"])

    assert sorted(path.name for path in (tmp_path / "merged").glob("*")) == sorted(
        path.name for path in (tmp_path / "merged").glob("*") if not path.name.startswith(".")
    )
    assert [path.name for path in (tmp_path / "merged").glob("model*")] == ["model.safetensors"]


def test_a_model_that_cannot_be_written_leaves_nothing_behind(bases, query, tmp_path, monkeypatch):

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("openrlhf.models.merging.os.replace", full)
    with pytest.raises(RunError, match="writing the merged model to .*merged failed.*No space left on device"):
        combine(query, tmp_path / "merged", base=bases["tied"])
    assert not (tmp_path / "merged").exists()


def test_the_command_ends_in_one_sentence_and_status_2_or_in_a_model(bases, query, tmp_path, capsys):
    main(["--lora_path", str(query), "--output_path", str(tmp_path / "merged")])
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"merged model: {tmp_path / 'merged'}")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype == torch.bfloat16

    with pytest.raises(SystemExit) as caught:
        main(["--lora_path", str(tmp_path), "--output_path", str(tmp_path / "again")])
    said = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2
    assert said == [
        f"openrlhf lora_combiner: --lora_path {tmp_path} is not an adapter: there is no adapter_config.json in it"
    ]


def test_a_disk_without_room_is_told_before_anything_is_merged(bases, query, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("openrlhf.models.merging.shutil.disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match="the merged model takes .* GB, and 1e-06 GB are free there"):
        combine(query, tmp_path / "merged", base=bases["tied"])
