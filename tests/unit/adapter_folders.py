"""Bases, adapters beside them as peft writes them, and lora_combiner over both."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from openrlhf.config import check, parse
from openrlhf.trainer.lora_combiner import run
from tests.tiny_models import make_tiny_model, make_tiny_moe, make_tokenizer

IDS = torch.tensor([[5, 499, 17, 40, 41, 260, 77, 3, 3, 90]])
LINEAR = {"target_modules": "all-linear"}
QUERY = {"target_modules": ["q_proj"]}


def make_bases(root: Path) -> dict[str, Path]:
    """Writes models to put adapters on. Returns: their folders."""
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


def logits_of(folder: Path) -> torch.Tensor:
    return torch.load(folder.parent / f"{folder.name}.logits")


def combine(adapter: Path, output: Path, *extra: str, base: Path | None = None, dtype: str = "fp32") -> list[str]:
    """Returns: the lines that the command prints."""
    words = ["--lora_path", str(adapter), "--output_path", str(output), "--ds.param_dtype", dtype, *extra]
    config = parse("lora_combiner", words + (["--model_path", str(base)] if base else []))
    check(config)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run(config)
    return printed.getvalue().splitlines()


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
