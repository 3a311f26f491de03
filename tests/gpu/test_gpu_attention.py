"""Packed rows give on the GPU what padded rows give, with every attention kernel that is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from openrlhf.config.kernels import FLASH_PACKAGES
from tests.gpu.gpu_process import on_gpu
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300, func_only=True)]

LENGTHS = (7, 40, 1, 23)
# Mean difference of log-probs by rounding alone.
CLOSE = {"fp32": 1e-4, "bf16": 2e-2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, which every kernel takes."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", head_dim=64)


def _packed_and_padded(folder: Path, kernel: str, dtype: str) -> tuple[str, float, float]:
    """Returns: the kernel that ran, and the mean and the largest difference of packed and padded log-probs."""
    from openrlhf.data.packed_batch import pack_rows
    from openrlhf.models.forward import ForwardPlan, score_tokens
    from openrlhf.models.loading import DTYPES, load_causal_lm
    from openrlhf.models.probe import plan_forward

    model = load_causal_lm(folder, dtype=DTYPES[dtype], device="cuda", attn_implementation=kernel)
    assert plan_forward(model, packing_samples=True, device=torch.device("cuda")) == ForwardPlan()
    rows = [(torch.arange(length) * 7919 + 17 * length) % 512 for length in LENGTHS]
    batch = pack_rows(rows, [torch.arange(length) > 0 for length in LENGTHS]).to("cuda")
    with torch.no_grad():
        packed = score_tokens(model, batch, plan=ForwardPlan(packed=True)).logprobs
        padded = score_tokens(model, batch, plan=ForwardPlan(packed=False)).logprobs
    difference = (packed - padded).abs()
    return model.config._attn_implementation, float(difference.mean()), float(difference.max())


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        *((kernel, "fp32") for kernel in ("eager", "sdpa", "auto")),
        *((kernel, "bf16") for kernel in ("eager", "sdpa", "torch_varlen", "auto")),
    ],
)
def test_packed_rows_are_padded_rows(kernel: str, dtype: str, model: Path) -> None:
    ran, mean, largest = on_gpu(_packed_and_padded, model, kernel, dtype)
    assert mean <= CLOSE[dtype] and largest <= 20 * CLOSE[dtype]
    if kernel == "sdpa" or (kernel == "auto" and dtype == "fp32"):
        assert ran == "segment_sdpa"
    elif kernel != "auto":
        assert ran == kernel
    else:
        installed = [name for name, package in FLASH_PACKAGES.items() if find_spec(package) is not None]
        assert ran == (installed or ["torch_varlen"])[0]


@pytest.mark.parametrize("kernel", FLASH_PACKAGES)
def test_packed_rows_are_padded_rows_with_flash_attention(kernel: str, model: Path) -> None:
    if find_spec(FLASH_PACKAGES[kernel]) is None:
        pytest.skip(f"needs the package {FLASH_PACKAGES[kernel]}, which is not installed")
    ran, mean, largest = on_gpu(_packed_and_padded, model, kernel, "bf16")
    assert ran == kernel
    assert mean <= CLOSE["bf16"] and largest <= 20 * CLOSE["bf16"]
