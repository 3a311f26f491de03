"""Adapters over weights in 4 bits on a GPU: what is packed, what is merged, what moves, and what sleeps."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrlhf.models.four_bit import is_four_bit
from tests.adapter_models import (
    LORA,
    TOKENS,
    assert_same_answers_with_a_gradient,
    load,
    logits,
    merged,
    moved,
    ragged_batch,
)
from tests.gpu.gpu_process import on_gpu
from tests.integration.backend_worker import STEPS, make_backend, micro_batches, train_with_backend
from tests.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600, func_only=True),
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs the package bitsandbytes"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen2", tie=True)


def _packed(module: Any) -> list[str]:
    return [name for name, item in module.named_parameters() if is_four_bit(item)]


def _merge(folder: Path, device: str) -> None:
    model = moved(load(folder, load_in_4bit=True, device=device))
    assert len(_packed(model)) == 14
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    before = logits(plain, TOKENS.to(device))
    plain.load_state_dict(merged(model), strict=False)
    found = logits(model, TOKENS.to(device))
    assert (logits(plain, TOKENS.to(device)) - found).abs().max() < 1e-3
    # Adapters and rounding to 4 bits change what the model says.
    assert (before - found).abs().max() > 0.01
    assert_same_answers_with_a_gradient(model, ragged_batch().to(device), 1e-5)


def test_merged_weights_over_four_bits_make_the_model_with_adapters(folder: Path) -> None:
    on_gpu(_merge, folder, "cuda")


def _steps(folder: Path, device: str) -> None:
    from openrlhf.backends.distributed import init_distributed

    init_distributed(device, timeout_s=120)
    for stage, dtype in ((2, "bf16"), (0, "fp32")):
        backend = make_backend(folder, stage, dtype=dtype, lora=LORA, load_in_4bit=True, device=device)
        assert len(_packed(backend.module)) == 14
        frozen = {name: item.clone() for name, item in backend.module.named_parameters() if not item.requires_grad}
        losses = train_with_backend(backend, range(STEPS))["losses"]
        assert losses[-1] < losses[0] + 0.1 and backend.unmoved_parameters() == []
        now = dict(backend.module.named_parameters())
        assert all(torch.equal(now[name], item) for name, item in frozen.items())
        batch = micro_batches(9)[0].to(backend.device)
        with torch.no_grad():
            said = backend.forward(batch).logprobs.clone()
            backend.offload()
            backend.reload()
            assert torch.equal(backend.forward(batch).logprobs, said)


def test_steps_over_four_bit_weights_move_the_adapters_alone_and_the_model_leaves_the_card_and_comes_back(
    folder: Path,
) -> None:
    on_gpu(_steps, folder, "cuda")
