"""What the ranks of the reward-model tests run, and the plain PyTorch loop that they are compared with."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_scheduler

from openrlhf.config import (
    AdamConfig,
    CkptConfig,
    LoggerConfig,
    OptimizerConfig,
    PreferenceDataConfig,
    RMConfig,
    RMModelConfig,
    SupervisedEvalConfig,
)
from openrlhf.config.deepspeed import RMDeepSpeedConfig
from openrlhf.config.train import RMTrainConfig
from openrlhf.data.sampler import StatefulSampler

BATCHES = (6, 5, 5)  # 16 pairs, 6 a batch
EPOCHS = 2
STEPS = len(BATCHES) * EPOCHS
SEED = 11
# Epsilon is large: the gradient of a key's bias is zero up to rounding, and Adam would blow that up to a whole step.
OPTIMIZER = OptimizerConfig(
    lr_scheduler="cosine_with_min_lr",
    lr_warmup_ratio=0.2,
    min_lr_ratio=0.1,
    max_norm=0.5,
    adam=AdamConfig(lr=2e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1),
)


def write_pairs(path: Path, pairs: int = sum(BATCHES), seed: int = 1) -> Path:
    """Sums with a right and a wrong answer, of very different lengths, and margins."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(pairs):
            numbers = [rng.randint(0, 99) for _ in range(rng.choice([1, 2, 3, 12]))]
            right = f"the answer is {sum(numbers)} ." * rng.choice([1, 1, 4])
            row = {"question": " + ".join(map(str, numbers)), "chosen": right, "rejected": "red " * rng.randint(1, 9)}
            file.write(json.dumps({**row, "margin": round(rng.random(), 3)}) + "\n")
    return path


def make_config(folder: Path, model: Path, data: Path, /, **changes: dict[str, Any]) -> RMConfig:
    """The settings of these tests; ``changes`` of groups by name."""
    groups: dict[str, Any] = {
        "model": RMModelConfig(model_name_or_path=str(model), margin_loss_enable=True),
        "optimizer": OPTIMIZER,
        "data": PreferenceDataConfig(dataset=str(data), prompt_key="question", input_template="Q: {}\nA: ", max_len=96),
        "eval": SupervisedEvalConfig(),
        "train": RMTrainConfig(batch_size=6, micro_batch_size=2, max_epochs=EPOCHS, seed=SEED),
        "ds": RMDeepSpeedConfig(param_dtype="fp32"),
        "ckpt": CkptConfig(output_dir=str(folder / "out"), path=str(folder / "states")),
        "logger": LoggerConfig(),
    }
    for name, change in changes.items():
        groups[name] = dataclasses.replace(groups[name], **change)
    return RMConfig(**groups, device="cpu")


def train_in_place(config: RMConfig) -> Any:
    """What ``rm.run`` does between joining and leaving the group. Returns: the backend."""
    from openrlhf.models.loading import load_tokenizer
    from openrlhf.trainer import rm
    from openrlhf.trainer.supervised_run import load_data

    tokenizer = load_tokenizer(config.model.model_name_or_path)
    data, evaluation = load_data(config, rm.tokenise, tokenizer)
    return rm.train(config, tokenizer, data, evaluation, device="cpu")


def plain_pairs(model: Path, data: Path) -> list[tuple[list[int], list[int], float]]:
    """Token ids of both rows and the margin, by the tokenizer alone."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    pairs = []
    for line in data.read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer.encode(f"Q: {row['question']}\nA: ")
        rows = ((prompt + tokenizer.encode(row[key]) + [tokenizer.eos_token_id])[:96] for key in ("chosen", "rejected"))
        pairs.append((*rows, row["margin"]))
    return pairs


def classifier(folder: Path) -> Any:
    """A model for sequence classification with one label, as plain transformers loads it."""
    return AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32, attn_implementation="eager"
    )


def plain_training(model_folder: Path, data: Path) -> dict[str, Any]:
    """The same run without any of our training code: one row at a time, torch's AdamW and clip."""
    pairs = plain_pairs(model_folder, data)
    model = classifier(model_folder)
    hidden = model.config.hidden_size
    head = torch.randn(1, hidden, generator=torch.Generator().manual_seed(SEED)) / (hidden + 1)
    with torch.no_grad():
        model.score.weight.copy_(head)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
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
            gaps = [_score(model, chosen) - _score(model, rejected) for chosen, rejected, _ in batch]
            losses = [
                -torch.nn.functional.logsigmoid(gap - margin) for gap, (_, _, margin) in zip(gaps, batch, strict=True)
            ]
            loss = sum(losses) / size
            loss.backward()
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            line = {"loss/train": loss.item(), "actor/grad_norm": norm, "actor/lr": scheduler.get_last_lr()[0]}
            line["accuracy/train"] = sum(bool(gap > 0) for gap in gaps) / size
            line["reward_gap/train"] = sum(gaps).item() / size
            lines.append(line)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return {"lines": lines, "weights": dict(model.state_dict())}


def _score(model: Any, ids: list[int]) -> torch.Tensor:
    return model.score(model.model(torch.tensor([ids])).last_hidden_state[0, -1])[0]


def exported(folder: str | Path) -> dict[str, torch.Tensor]:
    """The weights of an exported reward model, as plain transformers loads them."""
    return dict(AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).state_dict())
