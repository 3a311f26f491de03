"""DPO and RL with adapters: the reference is the model below them, and what is left behind is an adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from openrlhf.config import LoraConfig
from openrlhf.trainer.reference import ReferenceModel
from tests.integration import dpo_worker, rl_runs
from tests.integration.backend_worker import run_ranks
from tests.integration.sft_worker import metrics_of
from tests.tiny_models import make_tiny_model

LORA = LoraConfig(rank=4, alpha=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "actor", "qwen2", hidden=128)


def _ask_every_way(folder: Path, model: Path, copy: Path, data: Path) -> None:
    """Three runs: asking below the adapters, before training, and asking another model that is equal."""
    cases: list[dict[str, Any]] = [
        {"ref": {"model_name_or_path": str(copy)}},
        {},
        {"ref": {"precompute": True}, "ds": {"zero_stage": 3}},
    ]
    runs = []
    load = ReferenceModel.load
    for number, changes in enumerate(cases):
        shared = "model_name_or_path" not in changes.get("ref", {})
        changes["ds"] = {"lora": LORA, **changes.get("ds", {})}
        config = dpo_worker.make_config(folder / str(number), model, data, **changes)
        assert config.reference_below_adapters == shared
        ReferenceModel.load = None if shared else load  # type: ignore[method-assign, assignment]
        try:
            backend = dpo_worker.train_in_place(config)
        finally:
            ReferenceModel.load = load  # type: ignore[method-assign]
        assert backend.unmoved_parameters() == []
        if backend.rank == 0:
            out = Path(config.ckpt.output_dir)
            runs.append((metrics_of(config), load_file(out / "adapter_model.safetensors")))
            assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model)
    for lines, weights in runs[1:]:
        for line, wanted in zip(lines, runs[0][0], strict=True):
            for name in ("loss/train", "reward_gap/train", "actor/grad_norm"):
                assert line[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-5)
        assert all((weights[name] - tensor).abs().max() < 1e-5 for name, tensor in runs[0][1].items())


def test_dpo_asks_the_model_below_its_adapters_and_finds_what_another_equal_model_says(
    model: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    run_ranks(_ask_every_way, 2, tmp_path, model, copy, dpo_worker.write_pairs(tmp_path / "pairs.jsonl"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rl_trains_adapters_of_actor_and_critic_on_an_engine_that_has_them_merged(model: Path, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(rl_runs.REWARD)
    flags = [
        *("--ds.lora.rank", "4", "--ds.zero_stage", "3", "--actor.num_gpus_per_node", "2"),
        *("--algo.advantage.estimator", "gae", "--critic.num_gpus_per_node", "1", "--critic.adam.lr", "1e-3"),
        *("--critic.save_value_network", "--train.enable_ema", "--algo.kl.init_coef", "0.05"),
    ]
    prompts = rl_runs.write_prompts(tmp_path / "prompts.jsonl", count=8)
    run = rl_runs.finish(tmp_path, rl_runs.command(tmp_path, model, prompts, reward, *flags))
    assert run.process.returncode == 0, run.text()[-4000:]
    assert "starting 2 actor, 1 critic, 1 engine on Ray" in run.text()
    assert "note: --ref.num_gpus_per_node has no effect under --ds.lora.rank" in run.text()
    first, second = rl_runs.metrics(tmp_path)
    assert first["kl/reference"] == 0 and second["kl/reference"] != 0 and first["policy/ratio_mean"] == 1
    # The whole model is sent, and the engine with the second step's weights says what the trainer says.
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert first["sync/bytes"] == 4 * sum(item.numel() for item in whole.parameters())
    assert 0 < second["sync/logprob_gap"] < 1e-4

    out = tmp_path / "out"
    tokens = torch.arange(3, 20)[None]
    plain = whole(tokens).logits
    policy = peft.PeftModel.from_pretrained(whole, out)
    assert (policy(tokens).logits - plain).abs().max() > 1e-3
    actor, average = (load_file(Path(f"{out}{end}") / "adapter_model.safetensors") for end in ("", "_ema"))
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    assert 0 < average[name].norm() < 0.2 * actor[name].norm()
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    critic = peft.PeftModel.from_pretrained(base, f"{out}_critic")
    assert critic.base_model.model.score.modules_to_save["default"].weight.shape == (1, 128)
