"""What cannot be merged is refused in one sentence, and an output folder holds a whole model or nothing."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import IA3Config, get_peft_model
from transformers import AutoModelForCausalLM

from openrlhf.cli.lora_combiner import main
from openrlhf.config import ConfigError
from openrlhf.utils.errors import RunError
from tests.unit.adapter_folders import (
    QUERY,
    causal_adapter,
    combine,
    edited,
    first_replaced,
    pickled,
    reward_adapter,
    rewritten,
)

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

    monkeypatch.setattr("openrlhf.utils.move_files.os.replace", full)
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
    monkeypatch.setattr("openrlhf.models.merged_folder.shutil.disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match="the merged model takes .* GB, and 1e-06 GB are free there"):
        combine(query, tmp_path / "merged", base=bases["tied"])
