"""A stopped run goes on from its state on GPUs: the same weights, the same average of them, the same next steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from tests.gpu.gpu_process import needs_two_gpus, on_gpus
from tests.integration.backend_worker import LR, make_backend, train_with_backend
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900, func_only=True)]

CASES = (("fp32", 0), ("fp32", 2), ("bf16", 1), ("bf16", 3))
STOP, END = 2, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen2", tie=True)


def _begin(model: Path, dtype: str, stage: int, device: str, *, universal: bool = False) -> Any:
    return make_backend(
        model, stage, dtype=dtype, total_steps=END, ema=True, device=device, use_universal_ckpt=universal
    )


def _picture(backend: Any, folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """Weights and their average, whole. Collective."""
    backend.save_hf(folder, ema=True)
    dist.barrier()
    weights = {name: tensor.detach().float().cpu().numpy().copy() for name, tensor in backend.named_full_parameters()}
    average = {name: tensor.float().numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    dist.barrier()
    return {"weights": weights, "average": average}


def _go_on(backend: Any, folder: Path) -> dict[str, Any]:
    trace = train_with_backend(backend, range(STOP, END), ema=True)
    return {"trace": trace, **_picture(backend, folder)}


def _stop(model: Path, root: Path, device: str) -> list[dict[str, Any]]:
    """Trains, saves and goes on, for every case. Returns: what stood at the stop and at the end."""
    from openrlhf.backends.distributed import init_distributed

    init_distributed(device, timeout_s=120)
    found = []
    for dtype, stage in CASES:
        backend = _begin(model, dtype, stage, device)
        train_with_backend(backend, range(STOP), ema=True)
        backend.save_checkpoint(root / f"{dtype}-{stage}", {"step": STOP})
        found.append({"stop": _picture(backend, root / "export"), "end": _go_on(backend, root / "export")})
    return found


def _resume(model: Path, root: Path, device: str, universal: bool) -> list[dict[str, Any]]:
    """The same for runs that begin with the states of ``_stop``."""
    from openrlhf.backends.distributed import init_distributed

    init_distributed(device, timeout_s=120)
    found = []
    for dtype, stage in CASES:
        backend = _begin(model, dtype, stage, device, universal=universal)
        assert backend.load_checkpoint(root / f"{dtype}-{stage}") == {"step": STOP}
        found.append({"stop": _picture(backend, root / "export"), "end": _go_on(backend, root / "export")})
    return found


def assert_same_run(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Bit for bit at the stop; at the end up to the order in which numbers were added up."""
    for case, ours, wanted in zip(CASES, found, expected, strict=True):
        exact = case[0] == "fp32"
        for kind in ("weights", "average"):
            assert ours["stop"][kind].keys() == wanted["stop"][kind].keys()
            for name, values in wanted["stop"][kind].items():
                assert np.array_equal(ours["stop"][kind][name], values), f"{case}: {kind} {name} at the stop"
            for name, values in wanted["end"][kind].items():
                bound = LR / 20 if exact else 2 * LR + 0.01 * np.abs(values)
                assert (np.abs(ours["end"][kind][name] - values) <= bound).all(), f"{case}: {kind} {name} at the end"
        for key, values in wanted["end"]["trace"].items():
            assert ours["end"]["trace"][key] == pytest.approx(values, rel=1e-4 if exact else 2e-2), f"{case}: {key}"
        # Otherwise a state that was never loaded would pass.
        assert any(not np.array_equal(wanted["stop"]["weights"][n], v) for n, v in wanted["end"]["weights"].items())
        assert any(not np.array_equal(wanted["stop"]["average"][n], v) for n, v in wanted["stop"]["weights"].items())


@pytest.mark.parametrize("universal", [False, True], ids=["as saved", "converted"])
def test_a_run_goes_on_with_its_weights_and_their_average(model: Path, tmp_path: Path, universal: bool) -> None:
    expected = on_gpus(_stop, 1, model, tmp_path, "cuda")[0]
    assert_same_run(on_gpus(_resume, 1, model, tmp_path, "cuda", universal)[0], expected)


@needs_two_gpus
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_run_goes_on_on_another_number_of_gpus(model: Path, tmp_path: Path, before: int, after: int) -> None:
    expected = on_gpus(_stop, before, model, tmp_path, "cuda")[0]
    for found in on_gpus(_resume, after, model, tmp_path, "cuda", True):
        assert_same_run(found, expected)
