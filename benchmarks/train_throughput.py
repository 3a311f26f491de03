"""Training throughput of a random model: SFT steps through the backend and the loop that `train_sft` runs.

    python benchmarks/train_throughput.py --size 0.4B --row_tokens 512 --micro_tokens 16384 --step_tokens 131072
    deepspeed --num_gpus 2 benchmarks/train_throughput.py --size 4B --gradient_checkpointing --torch_compile

Prints one line of JSON. MFU counts 6 x parameters x tokens and causal attention; HFU counts what is computed twice as
well: whole layers under gradient checkpointing, and the logits in any case.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config

from openrlhf.backends.deepspeed_backend import DeepSpeedBackend
from openrlhf.backends.distributed import init_distributed
from openrlhf.config import AdamConfig, DeepSpeedConfig, OptimizerConfig
from openrlhf.data.sft import SFTRecord
from openrlhf.models.loading import DTYPES
from openrlhf.trainer.flops import model_flops, peak_flops
from openrlhf.trainer.process import prepare_process
from openrlhf.trainer.sft import SFTObjective
from openrlhf.trainer.supervised import train_step
from openrlhf.utils.devices import choose_device

VOCAB = 151_936
# hidden, layers, heads, key heads, intermediate, tied, vocabulary.
SIZES: dict[str, tuple[int, int, int, int, int, bool, int]] = {
    "toy": (64, 2, 4, 2, 128, True, 512),
    "0.4B": (1024, 24, 16, 4, 2816, True, VOCAB),
    "1.5B": (1536, 28, 12, 2, 8960, True, VOCAB),
    "4B": (2560, 36, 20, 4, 9728, False, VOCAB),
}
ROWS_LISTED = 25


@dataclass(frozen=True)
class Work:
    """Floating-point operations of one optimizer step over all ranks.

    Attributes:
        model: of forward and backward.
        hardware: with what is computed twice.
    """

    model: float
    hardware: float


class RandomRows:
    """A data set of rows of random tokens, all of one length."""

    def __init__(self, rows: int, length: int, vocab: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(vocab, (rows, length), generator=generator)
        self._mask = torch.arange(length) > 0
        self.lengths = [length] * rows
        self.trained_tokens = np.full(rows, length - 1)

    def __getitem__(self, row: int) -> SFTRecord:
        return SFTRecord(self._tokens[row], self._mask)


class Stopwatch:
    """Adds up the seconds of a method of an object, with all work that it queued on the device."""

    def __init__(self, owner: Any, method: str) -> None:
        self.seconds = 0.0
        self._plain = getattr(owner, method)
        setattr(owner, method, self)

    def __call__(self, *args: Any) -> Any:
        wait()
        start = time.perf_counter()
        result = self._plain(*args)
        wait()
        self.seconds += time.perf_counter() - start
        return result


def wait() -> None:
    """Until the GPU, where there is one, has done what is queued."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def model_config(size: str) -> Qwen2Config:
    """Returns: the shape of a size's name."""
    hidden, layers, heads, key_heads, intermediate, tied, vocab = SIZES[size]
    return Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=intermediate,
        tie_word_embeddings=tied,
        vocab_size=vocab,
        max_position_embeddings=131_072,
    )


def work_of_step(module: Any, lengths: Sequence[int], *, checkpointing: bool) -> Work:
    """Counts operations; the logits are computed twice in any case, and whole layers under gradient checkpointing.

    Args:
        module: a model that is trained whole.
        lengths: tokens of each row of the step.
    """
    work = model_flops(module).training(lengths)
    # A forward is a third of a step.
    head = 2 * module.config.vocab_size * module.config.hidden_size * sum(lengths)
    return Work(model=work, hardware=work + (work / 3 if checkpointing else head))


def make_model(size: str, dtype: torch.dtype, device: torch.device, folder: Path) -> None:
    """Writes a random model; drawn on the device, where that takes a second."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(model_config(size), dtype=dtype)
    model.save_pretrained(folder)


def make_backend(args: argparse.Namespace, folder: Path, device: torch.device) -> DeepSpeedBackend:
    """Loads the model that stands in ``folder`` for training."""
    return DeepSpeedBackend.for_training(
        folder,
        ds=DeepSpeedConfig(
            zero_stage=args.zero_stage,
            param_dtype=args.param_dtype,
            attn_implementation=args.attn,
            torch_compile=args.torch_compile,
        ),
        optimizer=OptimizerConfig(lr_scheduler="constant", adam=AdamConfig(lr=1e-5)),
        gradient_checkpointing=args.gradient_checkpointing,
        total_steps=args.warmup_steps + args.steps + 1,
        device=device.type,
    )


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Makes a model and runs its steps; collective. Returns: what is printed, the same on all ranks."""
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)
        if dist.get_rank() == 0:
            make_model(args.size, DTYPES[args.param_dtype], device, Path(own))
        dist.barrier()
        backend = make_backend(args, Path(shared[0]), device)
        dist.barrier()
    rows = args.step_tokens // args.row_tokens
    objective = SFTObjective(RandomRows(rows, args.row_tokens, SIZES[args.size][-1]), pad_token_id=0)

    def step() -> dict[str, float]:
        return train_step(backend, objective, range(rows), args.micro_tokens // args.row_tokens)

    for _ in range(args.warmup_steps):
        step()
    optimizer = Stopwatch(backend, "step")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    wait()
    start = time.perf_counter()
    losses = [step()["loss/train"] for _ in range(args.steps)]
    wait()
    seconds = (time.perf_counter() - start) / args.steps
    result = report(args, backend, objective.lengths, seconds)
    result |= {"optimizer_seconds": round(optimizer.seconds / args.steps, 4), "loss": losses[-1]}
    if args.profile is not None:
        profile(step, args.profile, device)
    return result


def report(
    args: argparse.Namespace, backend: DeepSpeedBackend, lengths: Sequence[int], seconds: float
) -> dict[str, Any]:
    """Returns: figures of a run whose steps took ``seconds`` each."""
    module = backend.module
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())
    work = work_of_step(module, lengths, checkpointing=args.gradient_checkpointing)
    on_gpu = backend.device.type == "cuda"
    name = torch.cuda.get_device_name(backend.device) if on_gpu else "cpu"
    peak = peak_flops(name)
    share = None if peak is None else 1 / (peak * backend.world_size * seconds)
    return {
        "size": args.size,
        "parameters": parameters,
        "device": name,
        "ranks": backend.world_size,
        "zero_stage": backend.stage,
        "dtype": args.param_dtype,
        "attention": module.config._attn_implementation,
        "packed": backend.plan.packed,
        "gradient_checkpointing": args.gradient_checkpointing,
        "torch_compile": args.torch_compile,
        "row_tokens": args.row_tokens,
        "micro_tokens": args.micro_tokens,
        "step_tokens": sum(lengths),
        "seconds_per_step": round(seconds, 4),
        "tokens_per_s": round(sum(lengths) / seconds, 1),
        "mfu": None if share is None else round(work.model * share, 4),
        "hfu": None if share is None else round(work.hardware * share, 4),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None,
    }


def profile(step: Any, file: Path, device: torch.device) -> None:
    """Writes the kernels of one more step, the longest first; of rank 0."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    on_gpu = device.type == "cuda"
    with recording(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as record:
        step()
        wait()
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    if dist.get_rank() == 0:
        file.write_text(record.key_averages().table(sort_by=order, row_limit=ROWS_LISTED))


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.4B")
    parser.add_argument("--row_tokens", type=int, default=512, help="tokens of each row")
    parser.add_argument("--micro_tokens", type=int, default=16_384, help="tokens of a micro-batch of one rank")
    parser.add_argument("--step_tokens", type=int, default=131_072, help="tokens of an optimizer step, all ranks")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup_steps", type=int, default=2)
    parser.add_argument("--zero_stage", type=int, default=2)
    parser.add_argument("--param_dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--attn", default="auto", help="as --ds.attn_implementation")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--torch_compile", action="store_true")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--profile", type=Path, help="file for a table of one step's kernels")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # The launcher gives it.
    args = parser.parse_args(words)
    for name, whole in (("row_tokens", "micro_tokens"), ("row_tokens", "step_tokens")):
        if getattr(args, whole) % getattr(args, name):
            parser.error(f"--{whole} {getattr(args, whole)} is no multiple of --{name} {getattr(args, name)}")
    return args


def main() -> None:
    """Measures and prints."""
    args = arguments()
    kind = choose_device(args.device)
    prepare_process(kind, bars=False)
    device = init_distributed(kind)
    result = measure(args, device)
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
