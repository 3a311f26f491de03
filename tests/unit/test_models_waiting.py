"""Forward and backward of a model use no operation for whose result a host would wait on a GPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from openrlhf.data.packed_batch import pack_rows
from openrlhf.models import forward
from openrlhf.models.forward import score_tokens, score_values, state_values
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.value_head import HeadSpec
from tests.tiny_models import make_tiny_model

# What reads a number, or needs one to know the size of its result.
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.default")
LENGTHS = (13, 7, 30)


class Watch(TorchDispatchMode):
    """Counts such operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        indices = [i for arg in args if isinstance(arg, list | tuple) for i in arg if isinstance(i, torch.Tensor)]
        by_mask = "index" in name and any(index.dtype == torch.bool for index in indices)
        uncounted = "repeat_interleave.Tensor" in name and (kwargs or {}).get("output_size") is None
        if by_mask or uncounted or any(part in name for part in WAITING):
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))


def test_the_watch_sees_what_waits() -> None:
    numbers = torch.tensor([1, 2, 3])
    for operation in (
        lambda: numbers[numbers > 1],
        lambda: numbers.max().item(),
        lambda: numbers.nonzero(),
        lambda: torch.repeat_interleave(numbers, numbers),
    ):
        with Watch() as watch:
            operation()
        assert watch.seen
    with Watch() as watch:
        torch.repeat_interleave(numbers, numbers, output_size=6)
        numbers[numbers.clamp(max=2)]
    assert not watch.seen


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "mistral", "gemma3"])
def test_a_micro_batch_reads_nothing_off_its_device(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path, architecture)
    rows = [(torch.arange(length) * 7919 + length) % 512 for length in LENGTHS]
    batch = pack_rows(rows, [torch.arange(length) > 0 for length in LENGTHS])
    watch, plain_run = Watch(), forward._run

    def watched(*args: Any) -> Any:
        with watch:
            return plain_run(*args)

    # From where the inputs stand on the device: what comes before is done in host memory.
    monkeypatch.setattr(forward, "_run", watched)
    options = {"dtype": torch.bfloat16, "device": "cpu", "gradient_checkpointing": True}
    loss = score_tokens(load_causal_lm(folder, **options).train(), batch, entropy=True).logprobs.sum()
    critic = load_causal_lm(folder, head=HeadSpec(fresh=True), **options).train()
    raw = score_values(critic, batch)
    with watch:
        loss.backward()
        state_values(raw, batch.cu_seqlens).sum().backward()
    assert not watch.seen
