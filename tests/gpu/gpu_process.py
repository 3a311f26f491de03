"""Runs one function in a fresh process on the GPU, and the plain training loop that a backend is compared with.

A fresh process, because DeepSpeed settles on an accelerator once, and a test that fails must not leave memory behind.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import get_scheduler

from openrlhf.config.checks_system import engine_devices
from tests.integration.backend_worker import EPS, LR, STEPS, decay_groups, micro_batches, share_of_rank, token_loss
from tests.ports import free_port


def needs_two_gpus(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that takes two cards; it runs apart from those that are dealt out to the cards."""
    missing = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
    return pytest.mark.several_gpus(missing(test))


def needs_engine(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that starts an engine; it has the GPUs that it sees for itself."""
    missing = pytest.mark.skipif("cuda" not in engine_devices(), reason="needs vLLM for GPUs, which is not installed")
    return pytest.mark.engine(missing(test))


def on_gpu(function: Callable[..., Any], *args: Any, seconds: float = 240) -> Any:
    """Calls ``function(*args)`` in a new process. Returns: its result; its traceback is raised."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    # No daemon: those may not start processes of their own, and an engine does.
    process = context.Process(target=_call, args=(theirs, function, args, None, seconds))
    process.start()
    theirs.close()
    try:
        ready = connection.wait([ours, process.sentinel], seconds)
        assert ready, f"{function.__name__} gave no result within {seconds:.0f} s"
        ok, result = _result(ours, process)
    finally:
        process.kill()
        process.join(10)
    assert ok, result
    return result


def on_gpus(function: Callable[..., Any], ranks: int, *args: Any, seconds: float = 300) -> list[Any]:
    """Calls ``function(*args)`` in as many new processes, each with a GPU.

    Returns: the results; tracebacks are raised.
    """
    context = multiprocessing.get_context("spawn")
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        places = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(context.Process(target=_call, args=(theirs, function, args, places, seconds)))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    deadline = time.monotonic() + seconds
    found: dict[int, Any] = {}
    try:
        while len(found) < ranks:
            # Of whichever rank ends first: the others wait for one that failed.
            waiting = sorted(set(range(ranks)) - set(found))
            signs = [sign for rank in waiting for sign in (pipes[rank], processes[rank].sentinel)]
            ready = connection.wait(signs, max(deadline - time.monotonic(), 0))
            assert ready, f"ranks {waiting} gave no result within {seconds:.0f} s"
            for rank in waiting:
                if pipes[rank] not in ready and processes[rank].sentinel not in ready:
                    continue
                ok, found[rank] = _result(pipes[rank], processes[rank])
                assert ok, f"rank {rank}: {found[rank]}"
        return [found[rank] for rank in range(ranks)]
    finally:
        for process in processes:
            process.kill()
            process.join(10)


def _result(pipe: Any, process: Any) -> tuple[bool, Any]:
    """Returns: whether the call went well, and its result or what went wrong, of a process that answered or ended."""
    try:
        if pipe.poll():
            return pipe.recv()
    except EOFError:
        pass
    except Exception as error:
        return False, f"its result cannot be read: {error!r}"
    process.join(10)
    return False, f"the process ended without a result, exit code {process.exitcode}"


def _call(
    pipe: Any, function: Callable[..., Any], args: tuple[Any, ...], places: dict[str, str] | None, seconds: float
) -> None:
    # Where it hangs shows in the test's output.
    faulthandler.dump_traceback_later(0.8 * seconds)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(places or {})
    os.environ["DS_ACCELERATOR"] = "cuda"
    try:
        pipe.send((True, function(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _numbers(tensor: torch.Tensor) -> np.ndarray:
    # Not as a tensor: torch would hand over a piece of memory that ends with this process.
    return tensor.detach().float().cpu().numpy()


def train_backend(backend: Any, *, sleep: bool = False) -> dict[str, Any]:
    """STEPS optimizer steps through a backend. Returns: losses of this rank, gradient norms, and all weights.

    Args:
        sleep: between steps, all of it leaves the GPU and comes back.
    """
    losses, norms = [], []
    for step in range(STEPS):
        batches = micro_batches(step)
        tokens = sum(int(batch.action_mask.sum()) for batch in batches)
        losses.append(0.0)
        for batch in share_of_rank(batches, backend.rank, backend.world_size):
            batch = batch.to(backend.device)
            loss = token_loss(backend.forward(batch).logprobs, batch, tokens)
            backend.backward(loss)
            losses[-1] += loss.item()
        result = backend.step()
        assert not result.skipped
        if sleep:
            backend.offload()
            backend.reload()
        norms.append(result.grad_norm)
    weights = {name: _numbers(tensor) for name, tensor in backend.named_full_parameters()}
    return {"losses": losses, "norms": norms, "weights": weights}


def train_plainly(folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    """The same steps on the GPU without DeepSpeed: float32 masters, whose gradients are added up in float32."""
    from openrlhf.models.forward import score_tokens
    from openrlhf.models.loading import load_causal_lm

    model = load_causal_lm(folder, dtype=dtype, device="cuda")
    masters = load_causal_lm(folder, dtype=dtype, device="cuda").float()
    optimizer = torch.optim.AdamW(decay_groups(masters, 0.1), lr=LR, betas=(0.9, 0.95), eps=EPS)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=STEPS)
    pairs = list(zip(model.parameters(), masters.parameters(), strict=True))
    losses, norms = [], []
    for step in range(STEPS):
        batches = [batch.to("cuda") for batch in micro_batches(step)]
        tokens = sum(int(batch.action_mask.sum()) for batch in batches)
        losses.append(0.0)
        for batch in batches:
            loss = token_loss(score_tokens(model, batch).logprobs, batch, tokens)
            loss.backward()
            losses[-1] += loss.item()
            for computing, master in pairs:
                grad = computing.grad.float()
                master.grad = grad if master.grad is None else master.grad + grad
                computing.grad = None
        norms.append(float(torch.nn.utils.clip_grad_norm_(masters.parameters(), 0.5)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for computing, master in pairs:
                computing.copy_(master)
    weights = {name: _numbers(parameter) for name, parameter in model.named_parameters()}
    return {"losses": losses, "norms": norms, "weights": weights}
