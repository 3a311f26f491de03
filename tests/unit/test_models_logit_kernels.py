"""The Triton kernels for logits equal plain float64, in Triton's interpreter; tests/gpu runs them compiled."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

pytest.importorskip("triton")

from tests import logit_cases  # noqa: E402

DEADLINE_S = 120


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process in which Triton interprets kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            yield pool


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("vocab", "banned"), [(3, False), (37, True), (4096, False), (4097, True), (9001, True)])
@pytest.mark.parametrize(("temperature", "entropy"), [(1.0, False), (0.7, True)])
def test_values_and_gradients_are_those_of_float64(
    interpreter: ProcessPoolExecutor, vocab: int, banned: bool, dtype: torch.dtype, temperature: float, entropy: bool
) -> None:
    call = interpreter.submit(logit_cases.scored_logits, vocab, dtype, temperature, entropy, banned)
    found = call.result(DEADLINE_S)
    # Logits near 40 have their last bit in float32 at 4e-6.
    assert all(distance < 1e-5 for distance in found.values()), found


@pytest.mark.parametrize("chunk_rows", [1, 4, 100])
@pytest.mark.parametrize("entropy", [True, False])
def test_an_output_head_gives_the_same_through_kernels_and_through_pytorch(
    interpreter: ProcessPoolExecutor, chunk_rows: int, entropy: bool
) -> None:
    answers = interpreter.submit(logit_cases.head_answers, chunk_rows, entropy).result(DEADLINE_S)
    assert len(answers["plain"]) == (4 if entropy else 3)
    for kernels, plain in zip(answers["kernels"], answers["plain"], strict=True):
        torch.testing.assert_close(torch.tensor(kernels), torch.tensor(plain), rtol=1e-5, atol=1e-5)


def test_a_nan_among_the_logits_is_not_hidden(interpreter: ProcessPoolExecutor) -> None:
    assert all(map(math.isnan, interpreter.submit(logit_cases.nan_answers).result(DEADLINE_S)))


def test_where_nothing_can_be_compiled_pytorch_does_the_work_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from openrlhf.models import logit_kernels

    def fail(*_: object) -> None:
        raise RuntimeError("\n  fatal error: Python.h: no such file\nmore")

    monkeypatch.setattr(logit_kernels, "row_statistics", fail)
    logit_kernels.compiles.cache_clear()
    assert logit_kernels.compiles(torch.device("cpu")) is False
    logit_kernels.compiles.cache_clear()
    assert "Triton cannot compile here (fatal error: Python.h: no such file)" in caplog.text and "gcc" in caplog.text


def test_a_gpu_that_is_out_of_memory_is_not_taken_for_one_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from openrlhf.models import logit_kernels

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(logit_kernels, "row_statistics", fail)
    logit_kernels.compiles.cache_clear()
    with pytest.raises(torch.OutOfMemoryError):
        logit_kernels.compiles(torch.device("cpu"))
    logit_kernels.compiles.cache_clear()
