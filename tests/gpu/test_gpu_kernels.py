"""Kernels on the GPU: as exact as plain PyTorch in half precision, and no micro-batch waits for the device."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.gpu_process import on_gpu
from tests.logit_cases import head_answers, scored_logits
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300, func_only=True)]

LENGTHS = [130, 7, 300, 1, 128, 64]
# Two kernels round the same numbers in different orders; a wrong mask or window is off by far more than this.
SLACK = 1.5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Heads of 64, which every kernel takes; one model with windows that rows cross."""
    folder = tmp_path_factory.mktemp("models")
    windows = {"head_dim": 64, "sliding_window": 6}
    return {
        "qwen3": make_tiny_model(folder / "qwen3", "qwen3", head_dim=64, layers=4),
        "mistral": make_tiny_model(folder / "mistral", "mistral", layers=4, **windows),
    }


def _masked(states: list[torch.Tensor], lengths: list[int], window: int | None) -> torch.Tensor:
    """Softmax over an explicit mask: same row, not later, inside the window. Returns: [1, T, heads, d]."""
    query, key, value = states
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(query.device)
    place = torch.arange(sum(lengths), device=query.device)
    back = place[:, None] - place
    mask = (row[:, None] == row) & (back >= 0) & (back < (window or sum(lengths)))
    scores = (query @ key.transpose(-1, -2) * 0.125).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def _attention_errors(key_heads: int, window: int | None, head_dim: int) -> dict[str, list[float]]:
    """Returns: by kernel, mean distance of output and gradients in bf16 from those of the same inputs in float64."""
    from openrlhf.models.attention import packing_arguments, segment_attention, varlen_attention

    torch.manual_seed(0)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to("cuda", torch.int32)
    half = [
        torch.randn(1, sum(LENGTHS), heads, head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for heads in (8, key_heads, key_heads)
    ]
    upstream = torch.randn(1, sum(LENGTHS), 8, head_dim, device="cuda", dtype=torch.bfloat16)

    def ours(kernel: Any, name: str) -> Any:
        arguments = packing_arguments(name, bounds, LENGTHS)
        return lambda states: kernel(
            torch.nn.Module(), *states, scaling=0.125, sliding_window=window, is_causal=True, **arguments
        )[0]

    kernels = {
        "eager": lambda states: _masked(states, LENGTHS, window),
        "segment_sdpa": ours(segment_attention, "segment_sdpa"),
        "torch_varlen": ours(varlen_attention, "torch_varlen"),
    }

    def answers(kernel: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        states = [state.detach().to(dtype).requires_grad_() for state in half]
        out = kernel(states)
        return [out.detach(), *torch.autograd.grad((out * upstream.to(dtype)).sum(), states)]

    true = answers(kernels["eager"], torch.float64)
    return {
        name: [
            float((found.double() - wanted).abs().mean())
            for found, wanted in zip(answers(kernel, torch.bfloat16), true, strict=True)
        ]
        for name, kernel in kernels.items()
    }


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("key_heads", "head_dim"), [(8, 64), (2, 128)])
def test_packed_kernels_in_bf16_are_as_near_to_float64_as_eager_attention(
    key_heads: int, head_dim: int, window: int | None
) -> None:
    errors = on_gpu(_attention_errors, key_heads, window, head_dim)
    for name in ("segment_sdpa", "torch_varlen"):
        for part, found, allowed in zip(("out", "query", "key", "value"), errors[name], errors["eager"], strict=True):
            assert found <= SLACK * allowed, f"{name}, {part}: {errors}"


def _batch() -> Any:
    from openrlhf.data.packed_batch import pack_rows

    rows = [(torch.arange(length) * 7919 + 17 * length) % 512 for length in LENGTHS]
    return pack_rows(rows, [torch.arange(length) > 0 for length in LENGTHS])


def _run_without_waiting(folder: Path, kernel: str, checkpointing: bool) -> float:
    """A micro-batch in a mode where PyTorch raises over whatever waits for the device. Returns: the loss."""
    from openrlhf.models.forward import score_tokens, score_values
    from openrlhf.models.loading import load_causal_lm
    from openrlhf.models.value_head import HeadSpec

    options = {"dtype": torch.bfloat16, "device": "cuda", "attn_implementation": kernel}
    model = load_causal_lm(folder, gradient_checkpointing=checkpointing, **options).train()
    critic = load_causal_lm(folder, head=HeadSpec(fresh=True), **options).train()
    total = torch.zeros((), device="cuda")
    # Once as it is: libraries are set up at their first use.
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            batch = _batch().to("cuda")
            loss = -score_tokens(model, batch, entropy=True).logprobs.sum() / 629
            loss.backward()
            score_values(critic, batch).sum().backward()
            total = total + loss.detach()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return float(total)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kernel", ["torch_varlen", "segment_sdpa"])
def test_a_micro_batch_never_waits_for_the_gpu(kernel: str, checkpointing: bool, models: dict[str, Path]) -> None:
    assert on_gpu(_run_without_waiting, models["qwen3"], kernel, checkpointing) > 0


def _head_errors() -> list[tuple[float, float]]:
    """Returns: of log-probs, entropies and both gradients, the distance from float64 of ours and of plain PyTorch."""
    from openrlhf.models.logprobs import ScoreRequest, logprobs_from_hidden

    torch.manual_seed(0)
    rows, vocab = 96, 4096
    hidden = torch.randn(rows, 128, device="cuda", dtype=torch.bfloat16)
    weight = 0.1 * torch.randn(vocab, 128, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(vocab, (rows,), device="cuda")
    request = ScoreRequest(targets, targets, 0.7, True, chunk_elements=20 * vocab, wide_elements=8 * vocab)

    def plain(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.nn.functional.linear(hidden, weight)
        softmax = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / 0.7).log_softmax(-1)
        return softmax.gather(-1, targets[:, None])[:, 0], -(softmax.exp() * softmax).sum(-1)

    def answers(function: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in (hidden, weight)]
        logprobs, entropy = function(*leaves)
        scale = torch.linspace(-1, 2, rows, device="cuda")
        gradients = torch.autograd.grad((logprobs * scale + entropy * scale.flip(0)).sum(), leaves)
        return [logprobs.detach(), entropy.detach(), *gradients]

    true = answers(plain, torch.float64)
    found = answers(lambda hidden, weight: logprobs_from_hidden(hidden, weight, None, request), torch.bfloat16)
    usual = answers(plain, torch.bfloat16)
    return [
        tuple(float((part.double() - wanted).abs().mean()) for part in parts)
        for *parts, wanted in zip(found, usual, true, strict=True)
    ]


def test_log_probs_by_chunks_in_bf16_are_as_near_to_float64_as_whole_logits() -> None:
    for part, (found, usual) in zip(("log-probs", "entropy", "hidden", "weight"), on_gpu(_head_errors), strict=True):
        assert found <= SLACK * usual, part


def _compiled_and_plain(folder: Path, checkpointing: bool) -> tuple[list[int], float, float]:
    """Returns: graphs after each batch, and the largest differences of log-probs and of gradients (of their size)."""
    from torch._dynamo.utils import counters

    from openrlhf.data.packed_batch import pack_rows
    from openrlhf.models.compiling import compile_layers
    from openrlhf.models.forward import score_tokens
    from openrlhf.models.loading import load_causal_lm

    plain, compiled = (
        load_causal_lm(
            folder,
            dtype=torch.bfloat16,
            device="cuda",
            attn_implementation="torch_varlen",
            gradient_checkpointing=checkpointing,
        ).train()
        for _ in range(2)
    )
    compile_layers(compiled)
    graphs, apart, turned = [], 0.0, 0.0
    for lengths in ((40, 7), (200, 3, 5), (64, 64, 65, 9), (130,)):
        rows = [(torch.arange(length) * 7919 + length) % 512 for length in lengths]
        batch = pack_rows(rows, [torch.arange(length) > 0 for length in lengths]).to("cuda")
        answers = []
        for model in (plain, compiled):
            logprobs = score_tokens(model, batch).logprobs
            gradients = torch.autograd.grad(logprobs.sum(), list(model.parameters()))
            answers.append((logprobs.detach(), torch.cat([part.float().flatten() for part in gradients])))
        apart = max(apart, float((answers[0][0] - answers[1][0]).abs().mean()))
        turned = max(turned, float((answers[0][1] - answers[1][1]).norm() / answers[0][1].norm()))
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs, apart, turned


@pytest.mark.parametrize("architecture", ["qwen3", "mistral"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_with_the_varlen_kernel_agree_and_make_no_graph_twice(
    architecture: str, checkpointing: bool, models: dict[str, Path]
) -> None:
    graphs, apart, turned = on_gpu(_compiled_and_plain, models[architecture], checkpointing)
    # A single row may get graphs of its own.
    assert 0 < graphs[0] and graphs[1] == graphs[2]
    assert apart <= 2e-2 and turned <= 5e-2


def _scored_logits() -> dict[str, dict[str, float]]:
    # In one process: starting one takes ten times as long as a case.
    cases = itertools.product(
        (torch.bfloat16, torch.float16, torch.float32),
        ((1.0, False), (0.7, True)),
        ((37, True), (4097, False), (151_936, False), (151_936, True)),
    )
    return {
        f"{dtype}, temperature {temperature}, entropy {entropy}, {vocab} logits, banned {banned}": scored_logits(
            vocab, dtype, temperature, entropy, banned, "cuda"
        )
        for dtype, (temperature, entropy), (vocab, banned) in cases
    }


def test_kernels_for_logits_are_those_of_float64() -> None:
    found = on_gpu(_scored_logits)
    assert len(found) == 24
    for case, distances in found.items():
        assert all(distance < 1e-5 for distance in distances.values()), (case, distances)


def _heads_on_gpu() -> list[tuple[bool, dict[str, list[Any]]]]:
    from openrlhf.models import logprobs

    chosen = logprobs._kernels(torch.empty(1, device="cuda")) is not None
    return [(chosen, head_answers(chunk_rows, entropy, "cuda")) for chunk_rows in (4, 100) for entropy in (True, False)]


def test_an_output_head_takes_the_kernels_and_gives_what_pytorch_gives() -> None:
    for chosen, answers in on_gpu(_heads_on_gpu):
        assert chosen
        for kernels, plain in zip(answers["kernels"], answers["plain"], strict=True):
            torch.testing.assert_close(torch.tensor(kernels), torch.tensor(plain), rtol=1e-5, atol=1e-5)
