"""What the ranks of the backend tests run, and the plain PyTorch loop that they are compared with."""

from __future__ import annotations

import atexit
import gc
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, get_scheduler

from openrlhf.config import AdamConfig, DeepSpeedConfig, OptimizerConfig
from openrlhf.data.packed_batch import PackedBatch, empty_batch, pack_rows
from tests.ports import free_port

STEPS = 3
# Large: the gradient of a key's bias is zero up to rounding, and Adam would blow that rounding up to a whole step.
EPS = 1e-4
LR = 1e-3
# Of the moving average.
BETA = 0.7
# Otherwise nothing of a tiny model is large enough to be sharded on stage 3.
KEEP_WHOLE = 0
OPTIMIZER = OptimizerConfig(
    lr_scheduler="linear",
    lr_warmup_ratio=0.0,
    max_norm=0.5,
    adam=AdamConfig(lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.1),
)


class RankPool:
    """Processes joined over gloo that run one function after another: starting them costs far more than a test."""

    def __init__(self, ranks: int) -> None:
        environment = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        # The server imports once, for all ranks of all pools.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["openrlhf.trainer.sft", "deepspeed"])
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank_main, args=(rank, environment, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = 240) -> list[Any]:
        """Calls ``function(*args)`` on every rank. Returns: the results; the first traceback is raised."""
        for pipe in self.pipes:
            pipe.send((function, args))
        deadline = time.monotonic() + seconds
        results: dict[int, Any] = {}
        while len(results) < len(self.pipes):
            assert time.monotonic() < deadline, f"ranks {set(range(len(self.pipes))) - set(results)} do not answer"
            for rank, pipe in enumerate(self.pipes):
                if rank not in results and pipe.poll(0.02):
                    ok, results[rank] = pipe.recv()
                    assert ok, f"rank {rank}:\n{results[rank]}"
        return [results[rank] for rank in range(len(self.pipes))]

    def close(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            process.kill()
            process.join(10)


_pools: dict[int, RankPool] = {}


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any, seconds: float = 240) -> list[Any]:
    """Runs ``function(*args)`` on as many joined processes as ranks, which stay for the tests that follow."""
    if ranks not in _pools:
        _pools[ranks] = RankPool(ranks)
    try:
        return _pools[ranks].run(function, *args, seconds=seconds)
    except BaseException:
        # The other ranks may wait in a collective that one of them will never reach.
        _pools.pop(ranks).close()
        raise


@atexit.register
def _close_pools() -> None:
    for pool in _pools.values():
        pool.close()


def _rank_main(rank: int, environment: dict[str, str], pipe: Any) -> None:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    torch.set_num_threads(1)
    from openrlhf.backends.distributed import init_distributed

    init_distributed("cpu", timeout_s=120)
    # What was imported stays, and DeepSpeed collects garbage at every start: it need not walk through all that.
    gc.freeze()
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        gc.collect()


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


def plain_adamw(model: Any) -> list[torch.optim.Optimizer]:
    """What moves the weights in the plain loops below, unless they are told otherwise."""
    return [torch.optim.AdamW(decay_groups(model, 0.1), lr=LR, betas=(0.9, 0.95), eps=EPS)]


def row_loss(model: Any, row: torch.Tensor, mask: torch.Tensor, index: int) -> torch.Tensor:
    """Minus the log-probs of a row's trained tokens, with plain transformers."""
    logprobs = model(row[None]).logits[0].log_softmax(-1)[:-1].gather(-1, row[1:, None])[:, 0]
    return -logprobs[mask[1:]].sum()


def plain_training(
    folder: Path,
    steps: int = STEPS,
    *,
    auto_class: Any = AutoModelForCausalLM,
    row_loss: Any = row_loss,
    make_optimizers: Callable[[Any], list[torch.optim.Optimizer]] = plain_adamw,
) -> dict[str, Any]:
    """The same training without any of our code: single rows, whole logits, torch's optimizers, a moving average."""
    model = auto_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizers = make_optimizers(model)
    schedulers = [get_scheduler("linear", each, num_warmup_steps=0, num_training_steps=steps) for each in optimizers]
    losses, norms, rates = [], [], []
    for step in range(steps):
        batches = micro_batches(step)
        tokens = sum(int(batch.action_mask.sum()) for batch in batches)
        total = torch.zeros(())
        for index, batch in enumerate(batches):
            bounds = batch.cu_seqlens.tolist()
            for start, stop in zip(bounds, bounds[1:], strict=False):
                row, mask = batch.tokens[start:stop], batch.action_mask[start:stop]
                total = total + row_loss(model, row, mask, index) / tokens
        total.backward()
        rates.append(optimizers[0].param_groups[0]["lr"])
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        losses.append(total.item())
        for each in (*optimizers, *schedulers):
            each.step()
        model.zero_grad()
        average = {
            name: BETA * average[name] + (1 - BETA) * parameter.detach() for name, parameter in model.named_parameters()
        }
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {"losses": losses, "norms": norms, "rates": rates, "weights": weights, "average": average}


def mixed_precision_training(
    folder: Path,
    steps: int = STEPS,
    *,
    make_optimizers: Callable[[Any], list[torch.optim.Optimizer]] = plain_adamw,
    max_norm: float = 0.5,
    accumulate: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """bf16 weights, float32 masters, gradients of micro-batches added up in float32 or bf16; no DeepSpeed."""
    from openrlhf.models.forward import score_tokens
    from openrlhf.models.loading import load_causal_lm

    model = load_causal_lm(folder, dtype=torch.bfloat16, device="cpu")
    masters = load_causal_lm(folder, dtype=torch.bfloat16, device="cpu").float()
    optimizers = make_optimizers(masters)
    schedulers = [get_scheduler("linear", each, num_warmup_steps=0, num_training_steps=steps) for each in optimizers]
    pairs = list(zip(model.parameters(), masters.parameters(), strict=True))
    losses, norms = [], []
    for step in range(steps):
        batches = micro_batches(step)
        tokens = sum(int(batch.action_mask.sum()) for batch in batches)
        losses.append(0.0)
        for batch in batches:
            loss = token_loss(score_tokens(model, batch).logprobs, batch, tokens)
            loss.backward()
            losses[-1] += loss.item()
            for half, master in pairs:
                grad = half.grad.float()
                total = grad if master.grad is None else master.grad + grad
                master.grad = total.to(accumulate).float()
                half.grad = None
        norms.append(float(torch.nn.utils.clip_grad_norm_(masters.parameters(), max_norm)))
        for each in (*optimizers, *schedulers):
            each.step()
        masters.zero_grad()
        with torch.no_grad():
            for half, master in pairs:
                half.copy_(master)
    return {"losses": losses, "norms": norms, "weights": {n: p.detach() for n, p in model.named_parameters()}}


def in_one_batch(batches: list[PackedBatch]) -> list[PackedBatch]:
    """The same rows as a single micro-batch."""
    rows = [row for batch in batches for row in batch.tokens.split(batch.lengths.tolist())]
    masks = [mask for batch in batches for mask in batch.action_mask.split(batch.lengths.tolist())]
    return [pack_rows(rows, masks)]


def logprob_loss(backend: Any, batch: PackedBatch, tokens: int, index: int) -> torch.Tensor:
    """This micro-batch's share of the loss of a language model."""
    return token_loss(backend.forward(batch).logprobs, batch, tokens)


def train_with_backend(
    backend: Any, steps: range, *, one_batch: bool = False, batch_loss: Any = logprob_loss, ema: bool = False
) -> dict[str, list[float]]:
    """Runs the given steps through the backend; losses are those of all ranks together.

    Args:
        one_batch: all rows of a step in one micro-batch, so that further ranks have none.
        batch_loss: called with the backend, a micro-batch, the step's tokens and the micro-batch's place in the step.
        ema: the moving average goes along.
    """
    losses, norms, rates = [], [], []
    for step in steps:
        batches = micro_batches(step)
        tokens = sum(int(batch.action_mask.sum()) for batch in batches)
        total = 0.0
        share = share_of_rank(in_one_batch(batches) if one_batch else batches, backend.rank, backend.world_size)
        for turn, batch in enumerate(share):
            batch = batch.to(backend.device)
            loss = batch_loss(backend, batch, tokens, turn * backend.world_size + backend.rank)
            backend.backward(loss)
            total += loss.item()
        result = backend.step()
        assert not result.skipped
        if ema:
            backend.ema_update(BETA)
        losses.append(backend.all_reduce(total))
        norms.append(result.grad_norm)
        rates.append(result.lr)
    return {"losses": losses, "norms": norms, "rates": rates}


def make_backend(folder: Path, stage: int, *, dtype: str = "fp32", **options: Any) -> Any:
    """A backend for training with the optimizer of these tests."""
    from deepspeed.utils import groups

    from openrlhf.backends.deepspeed_backend import DeepSpeedBackend

    # DeepSpeed makes the groups of --ds.zpg once a process, where a run trains one model; a test trains many.
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    ds_options = {key: options.pop(key) for key in list(options) if key in DeepSpeedConfig.__dataclass_fields__}
    return DeepSpeedBackend.for_training(
        folder,
        ds=DeepSpeedConfig(zero_stage=stage, param_dtype=dtype, **ds_options),
        optimizer=options.pop("optimizer", OPTIMIZER),
        total_steps=options.pop("total_steps", STEPS),
        device=options.pop("device", "cpu"),
        keep_whole=KEEP_WHOLE,
        **options,
    )


@contextmanager
def small_disk(limit: int, *, only: bool = True) -> Iterator[None]:
    """While it lasts, this process cannot write more than ``limit`` bytes into a file, as on a disk that is full.

    Args:
        only: False changes nothing.
    """
    if not only:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # What is printed may go to a file as well.
    printed = [os.dup(stream) for stream in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
        for stream, copy in zip((1, 2), printed, strict=True):
            os.dup2(copy, stream)
            os.close(copy)
        os.close(nowhere)


def full_weights(backend: Any) -> dict[str, torch.Tensor]:
    """Copies of all whole weights."""
    return {name: tensor.detach().clone() for name, tensor in backend.named_full_parameters()}
