"""What the ranks of the SFT tests run, and the plain PyTorch loop that they are compared with."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

from openrlhf.config import (
    AdamConfig,
    CkptConfig,
    DeepSpeedConfig,
    LoggerConfig,
    OptimizerConfig,
    SFTConfig,
    SFTDataConfig,
    SFTModelConfig,
    SFTTrainConfig,
    SupervisedEvalConfig,
)
from openrlhf.data.sampler import StatefulSampler
from openrlhf.tracking.jsonl import read_jsonl

ROWS = 22
BATCHES = (8, 7, 7)  # 22 rows, 8 a batch
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


def write_data(path: Path, rows: int = ROWS, seed: int = 1) -> Path:
    """Sums as prompt and response, of very different lengths."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(rows):
            numbers = [rng.randint(0, 99) for _ in range(rng.choice([1, 2, 3, 12]))]
            answer = f"the answer is {sum(numbers)} ." * rng.choice([1, 1, 4])
            file.write(json.dumps({"question": " + ".join(map(str, numbers)), "answer": answer}) + "\n")
    return path


def make_config(folder: Path, model: Path, data: Path, /, **changes: dict[str, Any]) -> SFTConfig:
    """The settings of these tests; ``changes`` of groups by name."""
    groups: dict[str, Any] = {
        "model": SFTModelConfig(model_name_or_path=str(model)),
        "optimizer": OPTIMIZER,
        "data": SFTDataConfig(dataset=str(data), input_key="question", output_key="answer", max_len=128),
        "eval": SupervisedEvalConfig(),
        "train": SFTTrainConfig(batch_size=8, micro_batch_size=3, max_epochs=EPOCHS, seed=SEED),
        "ds": DeepSpeedConfig(param_dtype="fp32"),
        "ckpt": CkptConfig(output_dir=str(folder / "out"), path=str(folder / "states")),
        "logger": LoggerConfig(),
    }
    for name, change in changes.items():
        groups[name] = dataclasses.replace(groups[name], **change)
    return SFTConfig(**groups, device="cpu")


def plain_rows(model: Path, data: Path) -> list[tuple[list[int], list[bool]]]:
    """Token ids and targets of the data, by the tokenizer alone."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = []
    for line in data.read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer.encode(f"User: {row['question']}\nAssistant: ")
        answer = tokenizer.encode(row["answer"]) + [tokenizer.eos_token_id]
        rows.append((prompt + answer, [False] * len(prompt) + [True] * len(answer)))
    return rows


def plain_training(model_folder: Path, data: Path) -> dict[str, Any]:
    """The same run without any of our training code: one row at a time, whole logits, torch's AdamW and clip."""
    rows = plain_rows(model_folder, data)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager")
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=2e-3,
        betas=(0.9, 0.95),
        eps=1e-5,
    )
    scheduler = get_scheduler(
        "cosine_with_min_lr",
        optimizer,
        num_warmup_steps=2,
        num_training_steps=STEPS,
        scheduler_specific_kwargs={"min_lr_rate": 0.1},
    )
    sampler = StatefulSampler(len(rows), seed=SEED)
    lines = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for size in BATCHES:
            batch = [rows[index] for index in sampler.next_batch(size)]
            tokens = sum(sum(mask) for _, mask in batch)
            loss = sum(_row_loss(model, ids, mask) for ids, mask in batch) / tokens
            loss.backward()
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            lines.append({"loss/train": loss.item(), "actor/grad_norm": norm, "actor/lr": scheduler.get_last_lr()[0]})
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return {"lines": lines, "weights": dict(model.state_dict()), "loss/eval": mean_loss(model, rows)}


@torch.no_grad()
def mean_loss(model: Any, rows: list[tuple[list[int], list[bool]]]) -> float:
    """Mean negative log-likelihood over all targets."""
    return float(sum(_row_loss(model, ids, mask) for ids, mask in rows)) / sum(sum(mask) for _, mask in rows)


def _row_loss(model: Any, ids: list[int], mask: list[bool]) -> torch.Tensor:
    tokens = torch.tensor(ids)
    logprobs = model(tokens[None]).logits[0].log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]
    return -logprobs[torch.tensor(mask[1:])].sum()


def train_in_place(config: SFTConfig) -> Any:
    """What ``sft.run`` does between joining and leaving the group. Returns: the backend."""
    from openrlhf.models.loading import load_tokenizer
    from openrlhf.trainer import sft
    from openrlhf.trainer.supervised_run import load_data

    tokenizer = load_tokenizer(config.model.model_name_or_path)
    data, evaluation = load_data(config, sft.tokenise, tokenizer)
    return sft.train(config, tokenizer, data, evaluation, device="cpu")


def metrics_of(config: SFTConfig) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without what depends on the clock."""
    timed = ("time", "time/step", "throughput/tokens_per_s")
    lines = read_jsonl(Path(config.ckpt.output_dir) / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name not in timed} for line in lines]


def exported(folder: str | Path) -> dict[str, torch.Tensor]:
    """The weights of an exported model, as plain transformers loads them."""
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Over all weights, which have to have the same names."""
    assert sorted(found) == sorted(expected)
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)
