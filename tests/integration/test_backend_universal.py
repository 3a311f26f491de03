"""Resuming on another number of ranks, through states that DeepSpeed converts."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch
from safetensors.torch import load_file

from openrlhf.cli.zero_to_universal import main
from openrlhf.models.value_head import HeadSpec
from tests.integration import backend_worker as worker
from tests.tiny_models import make_tiny_model

STAGES = (("fp32", 0), ("fp32", 1), ("fp32", 2), ("fp32", 3), ("bf16", 1), ("bf16", 2), ("bf16", 3))


def _value_loss(backend: Any, batch: Any, tokens: int, index: int) -> torch.Tensor:
    return torch.where(batch.action_mask, (backend.values(batch) - 0.5).square(), 0.0).sum() / tokens


def _draws() -> tuple[float, ...]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def _make(model: Path, stage: int, dtype: str, **options: Any) -> Any:
    return worker.make_backend(
        model, stage, dtype=dtype, total_steps=4, ema=True, head=HeadSpec(fresh=True, seed=3), **options
    )


def _picture(backend: Any, folder: Path) -> dict[str, Any]:
    """Weights and their average, whole."""
    backend.save_hf(folder, ema=True)
    torch.distributed.barrier()
    return {"weights": worker.full_weights(backend), "average": load_file(folder / "model.safetensors")}


def _go_on(backend: Any, folder: Path) -> dict[str, Any]:
    trace = worker.train_with_backend(backend, range(2, 4), batch_loss=_value_loss, ema=True)
    return {"trace": trace, **_picture(backend, folder)}


def _stop(model: Path, root: Path) -> list[dict[str, Any]]:
    """Trains two steps, saves, and goes on for two. Returns: what stood at the stop and at the end."""
    found = []
    for dtype, stage in STAGES:
        backend = _make(model, stage, dtype)
        worker.train_with_backend(backend, range(2), batch_loss=_value_loss, ema=True)
        random.seed(backend.rank)
        torch.manual_seed(100 + backend.rank)
        numpy.random.seed(backend.rank)
        backend.save_checkpoint(root / f"{dtype}-{stage}", {"step": 2})
        case = {"stop": _picture(backend, root / "export"), "end": _go_on(backend, root / "export")}
        found.append({**case, "draws": _after_seed(backend.rank)})
    return found


def _after_seed(rank: int) -> tuple[float, ...]:
    random.seed(rank)
    torch.manual_seed(100 + rank)
    numpy.random.seed(rank)
    return _draws()


def _resume_elsewhere(model: Path, root: Path, expected: list[dict[str, Any]]) -> None:
    for (dtype, stage), wanted in zip(STAGES, expected, strict=True):
        case = f"{dtype}, stage {stage}"
        for _ in range(2):  # the second time, what is converted stands there
            backend = _make(model, stage, dtype, use_universal_ckpt=True)
            assert backend.load_checkpoint(root / f"{dtype}-{stage}") == {"step": 2}, case
            assert _draws() == wanted["draws"], case
            assert not list((root / f"{dtype}-{stage}").glob(".universal*"))
        stop = _picture(backend, root / "export")
        for kind in ("weights", "average"):
            assert sorted(stop[kind]) == sorted(wanted["stop"][kind])
            for name, tensor in wanted["stop"][kind].items():
                assert torch.equal(stop[kind][name], tensor), f"{case}: {kind} {name} at the stop"
        end = _go_on(backend, root / "export")
        exact = dtype == "fp32"
        for key in ("losses", "norms", "rates"):
            wanted_trace = wanted["end"]["trace"][key]
            assert end["trace"][key] == pytest.approx(wanted_trace, rel=1e-5 if exact else 2e-2, abs=1e-6), case
        for kind in ("weights", "average"):
            for name, tensor in wanted["end"][kind].items():
                error = (end[kind][name].float() - tensor.float()).abs()
                # Ranks add gradients up in bf16; a step of Adam may then differ by as much as it is long.
                bound = 1e-6 if exact else 2 * worker.LR + 0.01 * tensor.abs().float()
                assert bool((error <= bound).all()), f"{case}: {kind} {name} at the end"


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_run_goes_on_on_another_number_of_ranks_with_the_random_state_of_rank_0(
    tmp_path: Path, before: int, after: int
) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    expected = worker.run_ranks(_stop, before, model, tmp_path)[0]
    worker.run_ranks(_resume_elsewhere, after, model, tmp_path, expected)


def _resume_broken(model: Path, folder: Path) -> str:
    from openrlhf.backends.distributed import RankError

    backend = _make(model, 2, "fp32", use_universal_ckpt=True)
    with pytest.raises(RankError) as caught:
        backend.load_checkpoint(folder)
    return str(caught.value)


def _save(model: Path, folder: Path) -> None:
    _make(model, 2, "fp32").save_checkpoint(folder, {})


def test_a_state_that_cannot_be_converted_stops_every_rank_with_one_sentence(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    folder = tmp_path / "global_step1"
    worker.run_ranks(_save, 2, model, folder)
    for path in (folder / "state").glob("*optim_states.pt"):
        path.write_bytes(path.read_bytes()[:1000])
    for said in worker.run_ranks(_resume_broken, 2, model, folder):
        assert said.startswith(f"converting the checkpoint {folder} for another number of ranks failed on rank 0: ")
        assert "DeepSpeed's converter ended with status 1" in said and "\n" not in said
    assert not list(folder.glob("*universal*"))


def _offloaded(model: Path, root: Path, universal: bool) -> list[dict[str, Any]]:
    """A language model whose optimizer stays in host memory: trained from the start, or from a converted state."""
    found = []
    for stage in (1, 2, 3):
        options = {"total_steps": 4, "adam_offload": True, "use_universal_ckpt": universal}
        backend = worker.make_backend(model, stage, **options)
        if universal:
            backend.load_checkpoint(root / str(stage))
        else:
            worker.train_with_backend(backend, range(2))
            backend.save_checkpoint(root / str(stage), {})
        found.append(
            {"trace": worker.train_with_backend(backend, range(2, 4)), "weights": worker.full_weights(backend)}
        )
    return found


@pytest.mark.parametrize("tie", [True, False])
def test_a_language_model_whose_optimizer_is_offloaded_goes_on_on_another_number_of_ranks(
    tmp_path: Path, tie: bool
) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2", tie=tie)
    expected = worker.run_ranks(_offloaded, 2, model, tmp_path, False)[0]
    found = worker.run_ranks(_offloaded, 1, model, tmp_path, True)[0]
    for stage, (ours, wanted) in enumerate(zip(found, expected, strict=True), start=1):
        for key, values in wanted["trace"].items():
            assert ours["trace"][key] == pytest.approx(values, rel=1e-5), f"stage {stage}: {key}"
        for name, tensor in wanted["weights"].items():
            assert (ours["weights"][name] - tensor).abs().max() <= 1e-6, f"stage {stage}: {name}"


def _picture_of_resumed(model: Path, folder: Path) -> dict[str, torch.Tensor]:
    backend = _make(model, 2, "fp32", use_universal_ckpt=True)
    backend.load_checkpoint(folder)
    return worker.full_weights(backend)


def test_states_are_converted_ahead_by_the_script_and_a_run_goes_on_from_them(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    states = [tmp_path / "states" / role / "global_step7" for role in ("_actor", "_critic")]
    for state in states:
        worker.run_ranks(_save, 2, model, state)
    script = Path(__file__).parents[2] / "examples/scripts/ckpt_ds_zero_to_universal.sh"
    done = subprocess.run(
        ["bash", str(script), str(tmp_path / "states")],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "is converted" in line]
    assert [line.split(" is converted:")[0] for line in lines] == [str(state) for state in states]
    # The run finds what is converted: it could not convert anything itself.
    (states[0] / "state").rename(tmp_path / "away")
    (weights,) = worker.run_ranks(_picture_of_resumed, 1, model, states[0])
    assert {tuple(tensor.shape) for tensor in weights.values()} and all(t.isfinite().all() for t in weights.values())


def test_a_folder_without_a_state_is_refused_in_one_sentence_and_a_state_of_stage_0_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([str(tmp_path)])
    said = capsys.readouterr().err
    assert caught.value.code == 2 and f"{tmp_path} holds no complete state" in said and said.count("\n") == 1
    state = tmp_path / "global_step3"
    state.mkdir()
    (state / "complete").write_text(json.dumps({"ranks": 1, "ZeRO stage": 0, "dtype": "float32"}))
    main([str(tmp_path)])
    assert "needs no conversion" in capsys.readouterr().out and not (state / "universal").exists()


def test_a_converted_state_that_lost_a_file_is_converted_again_and_never_loaded_as_it_is(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    state = tmp_path / "global_step2"
    worker.run_ranks(_save, 2, model, state)
    main([str(state)])
    (lost,) = state.glob("universal/zero/model.norm.weight/fp32.pt")
    (cut,) = state.glob("universal/zero/model.embed_tokens.weight/fp32.pt")
    lost.unlink()
    whole = cut.read_bytes()
    cut.write_bytes(whole[:-1])
    # What a killed conversion leaves, and something that has its name.
    (state / ".universal-left").mkdir()
    (state / ".universal-file").touch()
    main([str(state)])
    assert lost.is_file() and len(cut.read_bytes()) == len(whole) and not list(state.glob(".universal*"))
    # Nothing is there to be converted again.
    lost.unlink()
    (state / "state").rename(tmp_path / "away")
    for said in worker.run_ranks(_resume_broken, 1, model, state):
        assert f"{state / 'universal'} is not whole, and {state / 'state'} is not there to be converted again" in said
    assert (state / "universal").is_dir()


def _processes_that_name(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(str(folder) in word for word in process.cmdline()):
                found.append(process.pid)
    return found


def test_a_conversion_that_is_told_to_end_takes_its_workers_along_and_leaves_nothing_half_done(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    state = tmp_path / "global_step2"
    worker.run_ranks(_save, 2, model, state)
    process = subprocess.Popen([sys.executable, "-m", "openrlhf.cli.zero_to_universal", str(state)])
    deadline = time.monotonic() + 120
    while not list(state.glob(".universal-*/universal")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.terminate()
    assert process.wait(60) == 143
    assert _processes_that_name(state) == [] and not list(state.glob("*universal*"))
