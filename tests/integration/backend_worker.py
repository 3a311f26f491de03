"""What the ranks of the backend tests run, and the plain PyTorch loop that they are compared with."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, get_scheduler

from openrlhf.backends.distributed import free_port
from openrlhf.config import AdamConfig, DeepSpeedConfig, OptimizerConfig
from openrlhf.data.packed_batch import PackedBatch, empty_batch, pack_rows

STEPS = 3
# Large: the gradient of a key's bias is zero up to rounding, and Adam would blow that rounding up to a whole step.
EPS = 1e-5
LR = 2e-3
OPTIMIZER = OptimizerConfig(
    lr_scheduler="linear",
    lr_warmup_ratio=0.0,
    max_norm=0.5,
    adam=AdamConfig(lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.1),
)


def run_ranks(worker: Callable[..., None], ranks: int, *args: Any, seconds: float = 240) -> None:
    """Runs ``worker(*args)`` in as many processes as ranks, joined over gloo; the first traceback is raised."""
    environment = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    context = mp.get_context("spawn")
    errors = context.SimpleQueue()
    processes = [
        context.Process(target=_rank_main, args=(worker, rank, environment, errors, args)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(seconds)
            assert process.exitcode is not None, f"a rank did not end within {seconds} s"
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    assert errors.empty(), errors.get()
    assert [process.exitcode for process in processes] == [0] * ranks


def _rank_main(worker: Callable[..., None], rank: int, environment: dict[str, str], errors: Any, args: tuple) -> None:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    torch.set_num_threads(1)
    from openrlhf.backends.distributed import init_distributed, shutdown_distributed

    try:
        init_distributed("cpu", timeout_s=60)
        worker(*args)
    except BaseException:
        errors.put(f"rank {rank}:\n{traceback.format_exc()}")
        # The other ranks may wait in a collective that this one will never reach.
        os._exit(1)
    shutdown_distributed()


def micro_batches(step: int) -> list[PackedBatch]:
    """Five ragged micro-batches of the given step: 1 to 3 rows of 3 to 19 tokens."""
    generator = torch.Generator().manual_seed(100 + step)
    batches = []
    for count in (2, 1, 3, 2, 1):
        lengths = torch.randint(3, 20, (count,), generator=generator).tolist()
        rows = [torch.randint(3, 512, (length,), generator=generator) for length in lengths]
        masks = [torch.arange(length) >= 1 + length // 3 for length in lengths]
        batches.append(pack_rows(rows, masks))
    return batches


def share_of_rank(batches: list[PackedBatch], rank: int, world_size: int) -> list[PackedBatch]:
    """Deals micro-batches out; a rank that gets one less runs an empty one."""
    rounds = -(-len(batches) // world_size)
    share = batches[rank::world_size]
    return share + [empty_batch(pad_token_id=0)] * (rounds - len(share))


def token_loss(logprobs: torch.Tensor, batch: PackedBatch, tokens: int) -> torch.Tensor:
    """A share of the mean over all trained tokens of the step."""
    return -torch.where(batch.action_mask, logprobs, 0.0).sum() / tokens


def decay_groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, biases and norms do not."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def plain_training(folder: Path, steps: int = STEPS) -> dict[str, Any]:
    """The same training without any of our code: single rows, whole logits, torch's AdamW."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=LR, betas=(0.9, 0.95), eps=EPS)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=steps)
    losses, norms, rates = [], [], []
    for step in range(steps):
        batches = micro_batches(step)
        tokens = sum(int(batch.action_mask.sum()) for batch in batches)
        total = torch.zeros(())
        for batch in batches:
            bounds = batch.cu_seqlens.tolist()
            for start, stop in zip(bounds, bounds[1:], strict=False):
                row, mask = batch.tokens[start:stop], batch.action_mask[start:stop]
                logprobs = model(row[None]).logits[0].log_softmax(-1)[:-1].gather(-1, row[1:, None])[:, 0]
                total = total - logprobs[mask[1:]].sum() / tokens
        total.backward()
        rates.append(optimizer.param_groups[0]["lr"])
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        losses.append(total.item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {"losses": losses, "norms": norms, "rates": rates, "weights": weights}


def train_with_backend(backend: Any, steps: range) -> dict[str, list[float]]:
    """Runs the given steps through the backend; losses are those of all ranks together."""
    losses, norms, rates = [], [], []
    for step in steps:
        batches = micro_batches(step)
        tokens = sum(int(batch.action_mask.sum()) for batch in batches)
        total = 0.0
        for batch in share_of_rank(batches, backend.rank, backend.world_size):
            loss = token_loss(backend.forward(batch).logprobs, batch, tokens)
            backend.backward(loss)
            total += loss.item()
        result = backend.step()
        assert not result.skipped
        losses.append(backend.all_reduce(total))
        norms.append(result.grad_norm)
        rates.append(result.lr)
    return {"losses": losses, "norms": norms, "rates": rates}


def make_backend(folder: Path, stage: int, *, dtype: str = "fp32", **options: Any) -> Any:
    """A backend for training with the optimizer of these tests."""
    from openrlhf.backends.deepspeed_backend import DeepSpeedBackend

    ds_options = {key: options.pop(key) for key in list(options) if key in DeepSpeedConfig.__dataclass_fields__}
    return DeepSpeedBackend.for_training(
        folder,
        ds=DeepSpeedConfig(zero_stage=stage, param_dtype=dtype, **ds_options),
        optimizer=OPTIMIZER,
        total_steps=options.pop("total_steps", STEPS),
        device="cpu",
        **options,
    )


def full_weights(backend: Any) -> dict[str, torch.Tensor]:
    """Copies of all whole weights."""
    return {name: tensor.detach().clone() for name, tensor in backend.named_full_parameters()}
