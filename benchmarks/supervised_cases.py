"""Models, data and commands of both sides of compare_trl_supervised.py."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from openrlhf.data.sampler import StatefulSampler
from openrlhf.trainer.quickstart_task import CHAT_TEMPLATE, make_tokenizer

WORDS = "river bread moon sail tree music winter bridge house green seven quiet lamp north stone".split()
SEED = 42
# hidden, layers, intermediate, vocabulary: more entries than the tokenizer uses, so that the output head weighs.
SHAPES = {"toy": (64, 2, 128, 128), "small": (512, 6, 1536, 16_384)}
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
# Small differences of losses grow with the steps, and those below were measured over these.
BOUNDED_STEPS = 20


@dataclass(frozen=True)
class Settings:
    """What both sides share; a step takes ``batch`` rows or pairs in micro-batches of ``micro_batch``."""

    steps: int
    batch: int
    micro_batch: int
    dtype: str = "fp32"
    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    scheduler: str = "cosine_with_min_lr"
    warmup_ratio: float = 0.1
    min_lr_ratio: float = 0.1
    max_norm: float = 1.0
    max_len: int = 512


@dataclass(frozen=True)
class Difference:
    """Why and how far the losses of a case are not the same.

    Attributes:
        first: the first step, from 1, whose losses may be apart: DPO starts at the reference, where the model has not
            moved before the third.
        most: how far losses may be apart within the first ``BOUNDED_STEPS`` steps, about twice what was measured.
    """

    reason: str
    first: int
    most: float


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        task: "sft" or "dpo".
        form: how the data is laid out: "text" (prompt and response), "whole" (text that is trained throughout), "chat".
        flags: of the command here.
        trl: fields of TRL's config.
        template: the chat template of both sides.
        differs: how the losses are not the same; None where they have to be.
    """

    task: str
    form: str = "text"
    flags: tuple[str, ...] = ()
    trl: Mapping[str, Any] = field(default_factory=dict)
    template: str = CHAT_TEMPLATE
    differs: Difference | None = None


LINE_BREAK_TEMPLATE = CHAT_TEMPLATE.replace("<|end|>", "<|end|>\n")
ONE_PAIR = {"per_device_train_batch_size": 1}
CASES = {
    "sft_text": Case("sft"),
    "sft_padding_free": Case("sft", trl={"padding_free": True, "max_length": None}),
    "sft_whole": Case("sft", form="whole", flags=("--model.pretrain_mode_enable",)),
    "sft_chat": Case("sft", form="chat"),
    "sft_chat_line_break": Case(
        "sft",
        form="chat",
        template=LINE_BREAK_TEMPLATE,
        differs=Difference("TRL also trains what a template writes after the token that ends a turn", 1, 0.06),
    ),
    "dpo": Case("dpo"),
    "dpo_chat": Case("dpo", form="chat"),
    "dpo_precomputed": Case("dpo", flags=("--ref.precompute",), trl={"precompute_ref_log_probs": True}),
    "ipo": Case("dpo", flags=("--model.loss_type", "ipo"), trl={"loss_type": ["ipo"]}),
    # Sorting one pair does nothing, and what is left of this loss of TRL's is conservative DPO.
    "cdpo": Case(
        "dpo",
        flags=("--model.label_smoothing", "0.2"),
        trl={"loss_type": ["aot_unpaired"], "label_smoothing": 0.2, **ONE_PAIR},
    ),
    "cdpo_sigmoid": Case(
        "dpo",
        flags=("--model.label_smoothing", "0.2"),
        trl={"loss_type": ["sigmoid"], "label_smoothing": 0.2},
        differs=Difference("TRL's sigmoid loss leaves label_smoothing out", 3, 0.16),
    ),
    "cdpo_robust": Case(
        "dpo",
        flags=("--model.label_smoothing", "0.2"),
        trl={"loss_type": ["robust"], "label_smoothing": 0.2},
        differs=Difference("TRL's robust loss is another one: (−(1−e)·log σ(h) + e·log σ(−h)) / (1−2e)", 3, 0.46),
    ),
    "dpo_nll": Case(
        "dpo",
        flags=("--model.nll_loss_coef", "0.5"),
        trl={"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], **ONE_PAIR},
    ),
    "dpo_nll_batched": Case(
        "dpo",
        flags=("--model.nll_loss_coef", "0.5"),
        trl={"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
        differs=Difference(
            "TRL's sft part is a mean over the tokens of a micro-batch, here over tokens and then over pairs", 1, 0.04
        ),
    ),
}


def make_model(folder: Path, size: str, template: str = CHAT_TEMPLATE) -> Path:
    """Writes a random model of Qwen3's shape, with biases and norms off their defaults. Returns: ``folder``."""
    hidden, layers, intermediate, vocab = SHAPES[size]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.model_max_length = 4096
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        attention_bias=True,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_rows(task: str, form: str, count: int, characters: tuple[int, int]) -> list[dict[str, Any]]:
    """Makes rows of different length, in the columns that TRL reads; ours are named by flags.

    Args:
        characters: of a prompt with its response, the fewest and the most, roughly.

    Returns: rows with ``prompt`` and ``completion`` (SFT), ``text`` (form "whole"), or ``prompt``, ``chosen`` and
        ``rejected`` (DPO); lists of messages in form "chat".
    """
    draw = random.Random(0)

    def text(share: float) -> str:
        length = int(share * draw.uniform(*characters))
        words: list[str] = []
        while len(" ".join(words)) < length:
            words.append(draw.choice(WORDS))
        return " ".join(words)

    def message(role: str, content: str) -> Any:
        return [{"role": role, "content": content}] if form == "chat" else content

    answers = {"sft": ("completion",), "dpo": ("chosen", "rejected")}[task]
    rows = []
    for _ in range(count):
        if form == "whole":
            rows.append({"text": text(1.0)})
            continue
        row = {"prompt": message("user", f"{text(0.3)}: ")}
        rows.append(row | {name: message("assistant", text(0.7)) for name in answers})
    return rows


def write_data(folder: Path, rows: list[dict[str, Any]], settings: Settings) -> tuple[Path, Path]:
    """Writes the rows for both sides, for TRL in the order in which they are trained on here.

    Raises: ValueError where they are not those of ``settings.steps`` whole steps of one epoch.

    Returns: the file of this side and that of TRL.
    """
    if len(rows) != settings.steps * settings.batch:
        raise ValueError(f"{settings.steps} steps of {settings.batch} need as many rows, not {len(rows)}")
    order = StatefulSampler(len(rows), seed=SEED).next_batch(len(rows))
    files = folder / "rows.jsonl", folder / "rows_trl.jsonl"
    for file, kept in zip(files, (rows, [rows[place] for place in order]), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in kept))
    return files


def command_here(case: Case, settings: Settings, model: Path, data: Path, folder: Path) -> list[str]:
    """Returns: the command of train_sft or train_dpo; metrics and model go to ``folder``."""
    if case.task == "dpo":
        columns = ["--data.prompt_key", "prompt"]
    elif case.form == "whole":
        columns = ["--data.input_key", "text"]
    else:
        columns = ["--data.input_key", "prompt", "--data.output_key", "completion"]
    if case.form == "text":
        # TRL trains on prompts as they are.
        columns += ["--data.input_template", "{}"]
    return [
        *(sys.executable, "-m", f"openrlhf.cli.train_{case.task}", "--device", "cpu"),
        *("--model.model_name_or_path", str(model), "--data.dataset", str(data), *columns),
        *(["--data.apply_chat_template"] if case.form == "chat" else []),
        *("--data.max_len", str(settings.max_len), "--train.seed", str(SEED), "--train.max_epochs", "1"),
        *("--train.batch_size", str(settings.batch), "--train.micro_batch_size", str(settings.micro_batch)),
        *("--adam.lr", str(settings.lr), "--adam.betas", *map(str, settings.betas), "--adam.eps", str(settings.eps)),
        *("--adam.weight_decay", str(settings.weight_decay), "--lr_scheduler", settings.scheduler),
        *("--lr_warmup_ratio", str(settings.warmup_ratio), "--min_lr_ratio", str(settings.min_lr_ratio)),
        *("--max_norm", str(settings.max_norm), "--ds.param_dtype", settings.dtype, "--ds.zero_stage", "0"),
        *("--ckpt.output_dir", str(folder), "--ckpt.path", str(folder / "states")),
        *case.flags,
    ]


def job_of_trl(case: Case, settings: Settings, model: Path, data: Path, folder: Path) -> dict[str, Any]:
    """Returns: the job of trl_supervised.py; the model goes to ``folder``."""
    config = {
        "output_dir": str(folder),
        "num_train_epochs": 1,
        "per_device_train_batch_size": settings.micro_batch,
        "max_length": settings.max_len,
        "learning_rate": settings.lr,
        "adam_beta1": settings.betas[0],
        "adam_beta2": settings.betas[1],
        "adam_epsilon": settings.eps,
        "weight_decay": settings.weight_decay,
        "lr_scheduler_type": settings.scheduler,
        "lr_scheduler_kwargs": {"min_lr_rate": settings.min_lr_ratio},
        "warmup_steps": math.ceil(settings.steps * settings.warmup_ratio),
        "max_grad_norm": settings.max_norm,
        "seed": SEED,
        "bf16": False,
        **case.trl,
    }
    config.setdefault("gradient_accumulation_steps", settings.batch // config["per_device_train_batch_size"])
    return {
        "task": case.task,
        "model": str(model),
        "data": str(data),
        # Under autocast the weights stay in fp32.
        "dtype": "float32" if config["bf16"] else DTYPES[settings.dtype],
        "metrics": str(folder.with_suffix(".jsonl")),
        "config": config,
    }
