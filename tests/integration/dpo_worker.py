"""What the ranks of the DPO tests run, and the plain PyTorch loop that they are compared with."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

from openrlhf.config import (
    CkptConfig,
    DeepSpeedConfig,
    DPOConfig,
    DPOModelConfig,
    DPORefConfig,
    LoggerConfig,
    PreferenceDataConfig,
    TrainConfig,
)
from openrlhf.config.data import DPOEvalConfig
from openrlhf.data.sampler import StatefulSampler
from tests.integration.sft_worker import BATCHES, EPOCHS, OPTIMIZER, ROWS, SEED, STEPS

BETA, NLL = 0.1, 0.2

Row = tuple[list[int], int]
"""Token ids, and how many of them are the prompt."""


def write_pairs(path: Path, rows: int = ROWS, seed: int = 1) -> Path:
    """Sums with a right and a wrong answer, of very different lengths."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(rows):
            numbers = [rng.randint(0, 99) for _ in range(rng.choice([1, 2, 3, 12]))]
            right = f"the answer is {sum(numbers)} ." * rng.choice([1, 1, 4])
            wrong = f"the answer is {sum(numbers) + 1} ." * rng.choice([1, 1, 3])
            row = {"question": " + ".join(map(str, numbers)), "chosen": right, "rejected": wrong}
            file.write(json.dumps(row) + "\n")
    return path


def make_config(folder: Path, model: Path, data: Path, /, **changes: dict[str, Any]) -> DPOConfig:
    """The settings of these tests; ``changes`` of groups by name."""
    groups: dict[str, Any] = {
        "model": DPOModelConfig(model_name_or_path=str(model), beta=BETA, nll_loss_coef=NLL),
        "ref": DPORefConfig(),
        "optimizer": OPTIMIZER,
        "data": PreferenceDataConfig(dataset=str(data), prompt_key="question", max_len=128),
        "eval": DPOEvalConfig(),
        "train": TrainConfig(batch_size=8, micro_batch_size=2, max_epochs=EPOCHS, seed=SEED),
        "ds": DeepSpeedConfig(param_dtype="fp32"),
        "ckpt": CkptConfig(output_dir=str(folder / "out"), path=str(folder / "states")),
        "logger": LoggerConfig(),
    }
    for name, change in changes.items():
        groups[name] = dataclasses.replace(groups[name], **change)
    return DPOConfig(**groups, device="cpu")


def plain_pairs(model: Path, data: Path) -> list[tuple[Row, Row]]:
    """Rows of every pair, by the tokenizer alone."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    pairs = []
    for line in data.read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer.encode(row["question"])
        answers = (tokenizer.encode(row[key]) + [tokenizer.eos_token_id] for key in ("chosen", "rejected"))
        chosen, rejected = ((prompt + answer, len(prompt)) for answer in answers)
        pairs.append((chosen, rejected))
    return pairs


def plain_training(model_folder: Path, ref_folder: Path, data: Path) -> dict[str, Any]:
    """The same run without any of our training code: one row at a time, whole logits, torch's AdamW and clip."""
    pairs = plain_pairs(model_folder, data)
    model = load(model_folder)
    reference = load(ref_folder).requires_grad_(False)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), eps=1e-5)
    scheduler = get_scheduler(
        "cosine_with_min_lr",
        optimizer,
        num_warmup_steps=2,
        num_training_steps=STEPS,
        scheduler_specific_kwargs={"min_lr_rate": 0.1},
    )
    sampler = StatefulSampler(len(pairs), seed=SEED)
    lines = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for size in BATCHES:
            batch = [pairs[index] for index in sampler.next_batch(size)]
            line = mean_metrics(model, reference, batch, "train")
            line["loss/train"].backward()
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            values = {name: torch.as_tensor(value).item() for name, value in line.items()}
            lines.append(values | {"actor/grad_norm": norm, "actor/lr": scheduler.get_last_lr()[0]})
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return {"lines": lines, "weights": dict(model.state_dict())}


def mean_metrics(model: Any, reference: Any, pairs: list[tuple[Row, Row]], part: str) -> dict[str, torch.Tensor]:
    """Means over pairs of loss and metrics, by the name that the product gives them."""
    sums: dict[str, Any] = {}
    for chosen, rejected in pairs:
        won, lost = _row_sum(model, chosen), _row_sum(model, rejected)
        good, bad = BETA * (won - _row_sum(reference, chosen)), BETA * (lost - _row_sum(reference, rejected))
        nll = -won / (len(chosen[0]) - chosen[1])
        found = {
            "loss": -logsigmoid(good - bad) + NLL * nll,
            "accuracy": float(good > bad),
            "reward_chosen": good,
            "reward_rejected": bad,
            "reward_gap": good - bad,
            "nll": nll,
        }
        sums = {name: sums.get(name, 0.0) + value / len(pairs) for name, value in found.items()}
    return {f"{name}/{part}": value for name, value in sums.items()}


def load(folder: str | Path) -> Any:
    """A model as plain transformers has it, in float64: rounding of its own would use up what is allowed to differ."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")


def _row_sum(model: Any, row: Row) -> torch.Tensor:
    ids, prompt = row
    tokens = torch.tensor(ids)
    logprobs = model(tokens[None]).logits[0].log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]
    return logprobs[prompt - 1 :].sum()


def train_in_place(config: DPOConfig) -> Any:
    """What ``dpo.run`` does between joining and leaving the group. Returns: the backend."""
    from openrlhf.models.loading import load_tokenizer
    from openrlhf.trainer import dpo
    from openrlhf.trainer.supervised_run import load_data

    tokenizer = load_tokenizer(config.model.model_name_or_path)
    data, evaluation = load_data(config, dpo.tokenise, tokenizer)
    return dpo.train(config, tokenizer, data, evaluation, device="cpu")
