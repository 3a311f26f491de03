"""What saves memory and time on GPUs changes no number: offload, Muon over NCCL, overlapped reduction, Liger."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openrlhf.config import DeepSpeedConfig, MuonConfig, OptimizerConfig
from tests.gpu.gpu_process import needs_two_gpus, on_gpu, on_gpus, train_backend
from tests.integration.backend_worker import KEEP_WHOLE, LR, OPTIMIZER, STEPS, micro_batches
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600, func_only=True)]

MUON = replace(OPTIMIZER, optim="muon", muon=MuonConfig(lr=0.01))

# Settings of a backend: its flags, its optimizer, and whether it leaves the GPU between steps.
Case = tuple[dict[str, Any], OptimizerConfig, bool]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen2", tie=True)


def _train(folder: Path, cases: list[Case]) -> list[dict[str, Any]]:
    from openrlhf.backends.deepspeed_backend import DeepSpeedBackend
    from openrlhf.backends.distributed import init_distributed

    init_distributed("cuda", timeout_s=120)
    found = []
    for flags, optimizer, sleep in cases:
        backend = DeepSpeedBackend.for_training(
            folder,
            ds=DeepSpeedConfig(**flags),
            optimizer=optimizer,
            total_steps=STEPS,
            device="cuda",
            keep_whole=KEEP_WHOLE,
        )
        found.append(train_backend(backend, sleep=sleep))
        assert backend.unmoved_parameters() == []
    return found


def _furthest(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert sorted(one["weights"]) == sorted(other["weights"])
    return max(float(np.abs(one["weights"][name] - weight).max()) for name, weight in other["weights"].items())


@pytest.mark.parametrize("optimizer", [OPTIMIZER, MUON], ids=["adam", "muon"])
def test_an_optimizer_in_host_memory_takes_the_same_steps_and_leaves_the_gpu_with_the_rest(
    model: Path, optimizer: OptimizerConfig
) -> None:
    cases: list[Case] = [
        ({"zero_stage": stage, "param_dtype": "fp32", "adam_offload": offload}, optimizer, sleep)
        for stage in (1, 2, 3)
        for offload, sleep in ((False, False), (True, False), (True, True), (False, True))
    ]
    # On stage 1 in bf16 DeepSpeed has an optimizer that it does not move.
    halves: list[Case] = [({"zero_stage": 1, "param_dtype": "bf16"}, optimizer, sleep) for sleep in (False, True)]
    *found, awake, slept = on_gpu(_train, model, cases + halves, seconds=500)
    assert slept["norms"] == pytest.approx(awake["norms"], rel=1e-3) and _furthest(slept, awake) <= LR
    for start in range(0, len(cases), 4):
        plain, *others = found[start : start + 4]
        for case, other in zip(cases[start + 1 : start + 4], others, strict=True):
            assert other["norms"] == pytest.approx(plain["norms"], rel=1e-5), case
            assert _furthest(other, plain) <= LR / 20, case


@needs_two_gpus
def test_two_gpus_put_the_matrices_of_muon_together_as_one_does(model: Path) -> None:
    cases: list[Case] = [({"zero_stage": stage, "param_dtype": "fp32"}, MUON, False) for stage in (0, 1, 2, 3)]
    alone = on_gpu(_train, model, cases[:1])[0]
    for results in on_gpus(_train, 2, model, cases):
        for case, found in zip(cases, results, strict=True):
            assert found["norms"] == pytest.approx(alone["norms"], rel=1e-5), case
            assert _furthest(found, alone) <= LR / 20, case


@needs_two_gpus
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gradients_that_are_reduced_beside_the_backward_are_the_same(model: Path, dtype: str) -> None:
    cases: list[Case] = [
        ({"zero_stage": 2, "param_dtype": dtype, "overlap_comm": overlap, "adam_offload": offload}, OPTIMIZER, False)
        for offload in (False, True)
        for overlap in (False, True)
    ]
    for plain, overlapped, *offloaded in on_gpus(_train, 2, model, cases):
        assert overlapped["norms"] == pytest.approx(plain["norms"], rel=1e-6)
        assert _furthest(overlapped, plain) <= 1e-6
        assert offloaded[1]["norms"] == pytest.approx(offloaded[0]["norms"], rel=1e-6)
        assert _furthest(offloaded[1], offloaded[0]) <= 1e-6


def _logprobs_and_gradients(folder: Path, liger: bool) -> tuple[np.ndarray, dict[str, np.ndarray], str]:
    from openrlhf.models.forward import score_tokens
    from openrlhf.models.loading import load_causal_lm

    model = load_causal_lm(folder, dtype=torch.float32, device="cuda", liger=liger).train()
    batch = micro_batches(0)[2].to("cuda")
    logprobs = score_tokens(model, batch).logprobs
    logprobs[batch.action_mask].sum().backward()
    gradients = {name: parameter.grad.cpu().numpy() for name, parameter in model.named_parameters()}
    return logprobs.detach().cpu().numpy(), gradients, repr(model.model.norm)


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="needs the package liger-kernel")
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "gemma3"])
def test_kernels_of_liger_give_the_same_log_probs_and_gradients(tmp_path: Path, architecture: str) -> None:
    folder = make_tiny_model(tmp_path, architecture)
    plain, gradients, _ = on_gpu(_logprobs_and_gradients, folder, False)
    fused, others, norm = on_gpu(_logprobs_and_gradients, folder, True)
    assert "Liger" in norm
    assert np.abs(fused - plain).max() <= 1e-4
    for name, gradient in gradients.items():
        assert np.abs(others[name] - gradient).max() <= 1e-3 * max(float(np.abs(gradient).max()), 1e-2), name


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="needs the package liger-kernel")
def test_a_model_that_liger_does_not_know_is_refused_by_its_kind(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="--ds.use_liger_kernel: Liger has no kernels for a mamba"):
        on_gpu(_logprobs_and_gradients, make_tiny_model(tmp_path, "mamba", tie=False), True)
