"""Critics and reward models on the DeepSpeed backend, and the moving average of weights, against plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from openrlhf.config import ConfigError, DeepSpeedConfig
from openrlhf.data.packed_batch import PackedBatch, pack_rows
from openrlhf.models.value_head import HeadSpec
from tests.integration import backend_worker as worker
from tests.tiny_models import PAD_ID, make_tiny_model, make_tiny_moe

STEPS = range(worker.STEPS)
ROWS = [torch.arange(3, 20), torch.arange(40, 45), torch.arange(60, 71) * 3 % 512]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reward models: one with tied embeddings whose head is called otherwise, one as transformers exports it."""
    root = tmp_path_factory.mktemp("models")
    named = make_tiny_model(root / "named", "qwen2", tie=True, mean=0.5, std=2.0)
    weights = load_file(named / "model.safetensors")
    weights["value_head.weight"] = 0.1 * torch.randn(1, 64, generator=torch.Generator().manual_seed(5))
    save_file(weights, named / "model.safetensors", metadata={"format": "pt"})
    source = make_tiny_model(root / "language", "qwen3", tie=False)
    torch.manual_seed(6)
    plain = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)
    plain.save_pretrained(root / "exported")
    return {"named": named, "exported": root / "exported"}


def _target(position: torch.Tensor) -> torch.Tensor:
    return 0.3 * position.float().cos()


def _plain_row_loss(model: Any, row: torch.Tensor, mask: torch.Tensor, index: int) -> torch.Tensor:
    """Values in even micro-batches, the row's score in odd ones."""
    if index % 2:
        return (model(row[None]).logits[0, 0] - 1).square()
    outputs = model.score(model.model(row[None]).last_hidden_state)[0, :, 0]
    return (outputs[:-1] - _target(torch.arange(1, row.numel())))[mask[1:]].square().sum()


def _batch_loss(backend: Any, batch: PackedBatch, tokens: int, index: int) -> torch.Tensor:
    if index % 2:
        scores = backend.row_scores(batch)
        return (scores[: batch.num_rows - batch.pad_rows] - 1).square().sum() / tokens
    errors = (backend.values(batch) - _target(batch.position_ids)).square()
    return torch.where(batch.action_mask, errors, 0.0).sum() / tokens


class _Named(AutoModelForSequenceClassification):
    """Plain transformers, told what the head is called."""

    @classmethod
    def from_pretrained(cls, folder: Path, **options: Any) -> Any:
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, **options)
        weights = load_file(folder / "model.safetensors")
        if "value_head.weight" in weights:
            with torch.no_grad():
                model.score.weight.copy_(weights["value_head.weight"])
        return model


def _make(folder: Path, stage: int, **options: Any) -> Any:
    options.setdefault("head", HeadSpec(prefix="value_head", seed=1))
    return worker.make_backend(folder, stage, **options)


def _assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], case: str) -> None:
    assert sorted(found) == sorted(expected), case
    for name, tensor in found.items():
        assert (tensor - expected[name]).abs().max() <= 1e-6, f"{case}: {name}"


def _train_every_way(folders: dict[str, Path], expected: dict[str, dict[str, Any]], out: Path) -> None:
    cases = [(kind, stage, {}) for kind in folders for stage in (0, 1, 2, 3)]
    cases += [
        ("named", 3, {"packing_samples": False}),
        ("exported", 3, {"gradient_checkpointing": True}),
        ("named", 2, {"gradient_checkpointing": True, "gradient_checkpointing_reentrant": True}),
        ("named", 3, {"adam_offload": True}),
        ("named", 1, {"adam_offload": True}),
    ]
    for number, (kind, stage, options) in enumerate(cases):
        case = f"{kind}, stage {stage}, {options}"
        backend = _make(folders[kind], stage, ema=True, **options)
        assert backend.plan.packed == options.get("packing_samples", True), case
        assert len(backend.unmoved_parameters()) == len(expected[kind]["weights"]), case
        found = worker.train_with_backend(backend, STEPS, batch_loss=_batch_loss, ema=True)
        for key in ("losses", "norms"):
            assert found[key] == pytest.approx(expected[kind][key], rel=1e-5, abs=1e-6), f"{case}: {key}"
        assert backend.unmoved_parameters() == [], case
        _assert_close(worker.full_weights(backend), expected[kind]["weights"], case)
        folder = out / str(number)
        backend.save_hf(folder, ema=True)
        if backend.rank == 0:
            _assert_close(load_file(folder / "model.safetensors"), expected[kind]["average"], f"average of {case}")
        # The live weights are as they were.
        _assert_close(worker.full_weights(backend), expected[kind]["weights"], case)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_critic_takes_the_steps_of_a_plain_pytorch_loop_and_so_does_its_average(
    models: dict[str, Path], tmp_path: Path, ranks: int
) -> None:
    expected = {
        kind: worker.plain_training(folder, auto_class=_Named, row_loss=_plain_row_loss)
        for kind, folder in models.items()
    }
    worker.run_ranks(_train_every_way, ranks, models, expected, tmp_path)


def _plain_scores(folder: Path, side: str) -> torch.Tensor:
    """What plain transformers gives for the rows as one padded batch."""
    plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    longest = max(row.numel() for row in ROWS)
    pads = [torch.full((longest - row.numel(),), PAD_ID) for row in ROWS]
    pairs = zip(pads, ROWS, strict=True)
    ids = torch.stack([torch.cat([pad, row] if side == "left" else [row, pad]) for pad, row in pairs])
    with torch.no_grad():
        return plain(ids, attention_mask=(ids != PAD_ID).long()).logits[:, 0].float()


def _score(backend: Any) -> torch.Tensor:
    with torch.no_grad():
        return backend.row_scores(pack_rows(ROWS, [torch.arange(row.numel()) > 0 for row in ROWS]))


def _export_and_ask(folders: dict[str, Path], out: Path) -> None:
    from openrlhf.backends.deepspeed_backend import DeepSpeedBackend

    for kind, stage, dtype in (
        ("named", 0, "fp32"),
        ("named", 2, "bf16"),
        ("exported", 3, "fp32"),
        ("named", 3, "bf16"),
    ):
        folder = out / f"{kind}-{stage}-{dtype}"
        backend = _make(folders[kind], stage, dtype=dtype)
        assert (backend.config.mean, backend.config.std) == ((0.5, 2.0) if kind == "named" else (0.0, 1.0))
        worker.train_with_backend(backend, range(1), batch_loss=_batch_loss)
        assert backend.unmoved_parameters() == []
        backend.set_reward_statistics(-0.25, 1.5)
        backend.save_hf(folder)
        ours = _score(backend)
        assert ours.dtype == torch.float32
        if backend.rank == 0:
            saved = json.loads((folder / "config.json").read_text())
            assert saved["value_head_prefix"] == "score" and saved["pad_token_id"] == PAD_ID
            assert (saved["mean"], saved["std"]) == (-0.25, 1.5)
            assert saved["architectures"] == [type(backend.module).__name__]
            assert AutoModelForSequenceClassification.from_pretrained(folder).config.num_labels == 1
            for side in ("left", "right"):
                tolerance = 1e-5 if dtype == "fp32" else 0.05
                torch.testing.assert_close(_plain_scores(folder, side), ours, rtol=0, atol=tolerance)
        torch.distributed.barrier()
        for other in (0, 3):
            ds = DeepSpeedConfig(zero_stage=other, param_dtype=dtype)
            asked = DeepSpeedBackend.for_inference(
                folder, ds=ds, device="cpu", keep_whole=worker.KEEP_WHOLE, head=HeadSpec("value_head", seed=1)
            )
            assert (asked.config.mean, asked.config.std) == (-0.25, 1.5)
            assert torch.equal(_score(asked), ours) or dtype == "fp32"
            torch.testing.assert_close(_score(asked), ours, rtol=0, atol=1e-5)


def test_an_exported_reward_model_scores_alike_in_plain_transformers_and_here_padded_on_either_side(
    models: dict[str, Path], tmp_path: Path
) -> None:
    worker.run_ranks(_export_and_ask, 2, models, tmp_path)


def _fresh(folder: Path, out: Path) -> list[list[float]]:
    heads = []
    for stage, dtype in ((0, "fp32"), (2, "fp32"), (3, "fp32"), (3, "bf16")):
        torch.manual_seed(stage)
        backend = _make(folder, stage, dtype=dtype, head=HeadSpec(fresh=True, seed=9), seed=20 + stage)
        # ZeRO-3 would round rotary frequencies to bf16 while it loads.
        assert {buffer.dtype for buffer in backend.module.buffers()} == {torch.float32}
        weight = worker.full_weights(backend)["score.weight"].float()
        heads.append(weight.bfloat16().flatten().tolist())
        worker.train_with_backend(backend, range(1), batch_loss=_batch_loss)
        assert backend.unmoved_parameters() == [], "a head of zeros would stop the body's gradient"
    with pytest.raises(ConfigError, match="has no scalar head"):
        _make(folder, 3)
    return heads


@pytest.mark.parametrize("architecture", ["llama", "qwen2_moe"])
def test_a_fresh_head_is_the_same_on_all_ranks_stages_and_dtypes(tmp_path: Path, architecture: str) -> None:
    make = make_tiny_moe if architecture == "qwen2_moe" else make_tiny_model
    folder = make(tmp_path / "model")
    ranks = worker.run_ranks(_fresh, 2, folder, tmp_path / "out")
    heads = [head for rank in ranks for head in rank]
    assert all(head == heads[0] for head in heads) and any(heads[0])


STAGES = (("fp32", 0), ("fp32", 1), ("fp32", 2), ("fp32", 3), ("bf16", 1), ("bf16", 2), ("bf16", 3))


def _rest(backend: Any, folder: Path) -> dict[str, Any]:
    trace = worker.train_with_backend(backend, range(2, 4), batch_loss=_batch_loss, ema=True)
    backend.save_hf(folder, ema=True)
    torch.distributed.barrier()
    return {"trace": trace, "weights": worker.full_weights(backend), "average": load_file(folder / "model.safetensors")}


def _stop_and_resume(model: Path, out: Path) -> None:
    for dtype, stage in STAGES:
        case = f"{dtype}, stage {stage}"
        options = {"dtype": dtype, "total_steps": 4, "ema": True}
        target = out / case
        first = _make(model, stage, **options)
        worker.train_with_backend(first, range(2), batch_loss=_batch_loss, ema=True)
        first.save_checkpoint(target, {"step": 2})
        expected = _rest(first, out / f"{case}, first")
        second = _make(model, stage, **options)
        assert second.load_checkpoint(target) == {"step": 2}
        found = _rest(second, out / f"{case}, second")
        assert found["trace"] == expected["trace"], case
        for kind in ("weights", "average"):
            for name, tensor in expected[kind].items():
                assert torch.equal(found[kind][name], tensor), f"{case}: {kind} {name}"
        assert not torch.equal(found["average"]["score.weight"], found["weights"]["score.weight"]), case
        # A run that keeps no average may go on without it.
        assert _make(model, stage, dtype=dtype, total_steps=4).load_checkpoint(target) == {"step": 2}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_critic_and_its_average_go_on_bit_for_bit_on_every_stage(
    models: dict[str, Path], tmp_path: Path, ranks: int
) -> None:
    worker.run_ranks(_stop_and_resume, ranks, models["named"], tmp_path)


def _without_average(model: Path, out: Path) -> list[str]:
    said = []
    for stage in (0, 2):
        backend = _make(model, stage)
        backend.save_checkpoint(out / str(stage), {})
        for call, options in ((backend.ema_update, {"beta": 0.5}), (backend.save_hf, {"folder": out, "ema": True})):
            with pytest.raises(ConfigError, match="no moving average of the weights is kept: .*--train.enable_ema"):
                call(**options)
        with pytest.raises(ConfigError) as caught:
            _make(model, stage, ema=True).load_checkpoint(out / str(stage))
        said.append(str(caught.value))
    return said


def test_an_average_that_nobody_kept_is_neither_exported_nor_resumed(models: dict[str, Path], tmp_path: Path) -> None:
    for said in worker.run_ranks(_without_average, 2, models["named"], tmp_path):
        assert all("holds no moving average of the weights: resume without --train.enable_ema" in each for each in said)
    assert not list(tmp_path.glob("*.json"))


def _average_language_models(folders: dict[str, Path], expected: dict[str, dict[str, Any]], out: Path) -> None:
    for kind, folder in folders.items():
        for stage, dtype in ((0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (2, "bf16"), (3, "bf16")):
            backend = worker.make_backend(folder, stage, dtype=dtype, ema=True)
            worker.train_with_backend(backend, STEPS, ema=True)
            target = out / f"{kind}-{stage}-{dtype}"
            backend.save_hf(target, ema=True)
            if backend.rank == 0:
                plain = AutoModelForCausalLM.from_pretrained(target)
                tied = plain.get_input_embeddings().weight is plain.get_output_embeddings().weight
                assert tied == (kind == "tied")
                assert plain.dtype == (torch.float32 if dtype == "fp32" else torch.bfloat16)
                for name, tensor in plain.named_parameters():
                    error = (tensor.float() - expected[kind]["average"][name]).abs()
                    # Half-precision weights start rounded, and so does what is exported.
                    bound = 1e-6 if dtype == "fp32" else 2 * worker.LR + 0.01 * tensor.abs().float()
                    assert bool((error <= bound).all()), f"{target.name}: {name}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_average_of_a_language_model_is_that_of_a_plain_loop_and_keeps_ties(tmp_path: Path, ranks: int) -> None:
    folders = {
        "tied": make_tiny_model(tmp_path / "tied", "qwen2", tie=True),
        "untied": make_tiny_model(tmp_path / "untied", "llama", tie=False),
    }
    expected = {kind: worker.plain_training(folder) for kind, folder in folders.items()}
    worker.run_ranks(_average_language_models, ranks, folders, expected, tmp_path)
