"""Whole weights out of sharded models: for the rollout engine, and as folders that plain transformers loads."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

from openrlhf.backends.shards import ShardWriter
from tests.integration import backend_worker as worker
from tests.tiny_models import make_tiny_model, make_tiny_moe

TOKENS = torch.arange(3, 20)[None]


def _train_and_save(source: Path, target: Path, stage: int, dtype: str) -> None:
    backend = worker.make_backend(source, stage, dtype=dtype)
    worker.train_with_backend(backend, range(1))
    full = worker.full_weights(backend)
    backend.save_hf(target)
    backend.save_hf(target)  # over what stands there
    if backend.rank == 0:
        with torch.no_grad():
            backend.model.eval()
            reloaded = AutoModelForCausalLM.from_pretrained(target)
            assert reloaded.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
            weights = dict(reloaded.named_parameters())
            assert sorted(weights) == sorted(full)
            for name, tensor in full.items():
                assert torch.equal(tensor, weights[name]), name
            original = AutoModelForCausalLM.from_pretrained(source, dtype=reloaded.dtype)
            assert reloaded.config.tie_word_embeddings == original.config.tie_word_embeddings
            tied = reloaded.get_input_embeddings().weight is reloaded.get_output_embeddings().weight
            assert tied == original.config.tie_word_embeddings
            assert not torch.equal(reloaded(TOKENS).logits, original(TOKENS).logits)
        generation = GenerationConfig.from_pretrained(target)
        assert generation.temperature == 0.7 and generation.do_sample
        assert json.loads((target / "config.json").read_text())["architectures"] == [type(reloaded).__name__]
        assert not (target / ".partial").exists()


def _save_all(sources: dict[str, Path], folder: Path) -> None:
    for name, source in sources.items():
        stages = ((0, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16"))
        # A state-space model takes seconds a step in plain PyTorch.
        for stage, dtype in stages[1:3] if "mamba" in str(source) else stages:
            _train_and_save(source, folder / f"{name}-{stage}-{dtype}", stage, dtype)


def test_an_exported_model_reloads_in_plain_transformers_with_the_trained_weights(tmp_path: Path) -> None:
    # RB35: tied and untied, with and without buffers that are not saved (rotary frequencies, embedding scales).
    sources = {
        "tied": make_tiny_model(tmp_path / "tied", "qwen2", tie=True),
        "untied": make_tiny_model(tmp_path / "untied", "llama", tie=False),
        "tied-more-buffers": make_tiny_model(tmp_path / "gemma", "gemma3", tie=True),
        "untied-no-buffer": make_tiny_model(tmp_path / "mamba", "mamba", tie=False),
    }
    worker.run_ranks(_save_all, 2, sources, tmp_path / "out")


SHARD_BYTES = 60_000


def _save_in_shards(sources: dict[str, Path], folder: Path) -> None:
    """Writes every model, and its moving average where that is another one, in small files."""
    from openrlhf.backends.weights import write_hf_folder

    for name, source in sources.items():
        for stage in (0, 2, 3):
            backend = worker.make_backend(source, stage, ema=True)
            target = folder / f"{name}-{stage}"
            write_hf_folder(backend.module, target, sharded=stage == 3, max_shard_bytes=SHARD_BYTES)
            if name != "tied":
                continue
            worker.train_with_backend(backend, range(1), ema=True)
            average = dict(backend._average.whole(backend.device))
            options = {"sharded": stage == 3, "average": backend._average, "max_shard_bytes": SHARD_BYTES}
            write_hf_folder(backend.module, folder / f"{name}-{stage}-ema", **options)
            if backend.rank == 0:
                reloaded = dict(AutoModelForCausalLM.from_pretrained(folder / f"{name}-{stage}-ema").named_parameters())
                assert sorted(reloaded) == sorted(average)
                for key, tensor in average.items():
                    assert torch.equal(reloaded[key], tensor), f"stage {stage}: {key}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_shards_of_an_export_are_those_of_save_pretrained_byte_for_byte_on_every_stage(
    tmp_path: Path, ranks: int
) -> None:
    sources = {
        "tied": make_tiny_model(tmp_path / "tied", "qwen2", tie=True),
        "untied": make_tiny_model(tmp_path / "untied", "llama", tie=False),
        "experts": make_tiny_moe(tmp_path / "moe"),
    }
    worker.run_ranks(_save_in_shards, ranks, sources, tmp_path)
    for name, source in sources.items():
        plain = tmp_path / f"{name}-plain"
        AutoModelForCausalLM.from_pretrained(source).save_pretrained(plain, max_shard_size=SHARD_BYTES)
        expected = {path.name: path.read_bytes() for path in plain.glob("model*")}
        assert len(expected) > 5 and "model.safetensors.index.json" in expected
        for stage in (0, 2, 3):
            folder = tmp_path / f"{name}-{stage}"
            found = {path.name: path.read_bytes() for path in folder.glob("model*")}
            if name == "experts":
                # save_pretrained takes an expert to be as large as the fused weight that it is a part of.
                assert len(found) > 5 and _tensors(folder) == _tensors(plain), f"stage {stage}"
                continue
            assert sorted(found) == sorted(expected), f"{name}, stage {stage}"
            assert [file for file in expected if found[file] != expected[file]] == [], f"{name}, stage {stage}"
            AutoModelForCausalLM.from_pretrained(folder)


def _tensors(folder: Path) -> dict[str, bytes]:
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: tensor.numpy().tobytes() for file in files for name, tensor in file.items()}


def test_an_export_writes_each_file_as_soon_as_it_is_full_so_that_no_more_is_held(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, max_bytes=100)
    source = torch.zeros(20)
    for number in range(6):
        writer.add(f"w{number}", source.fill_(number))
        assert len(list(tmp_path.iterdir())) == number and len(writer._held) == 1
    writer.add("large", torch.ones(50))
    writer.finish(170)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": 170, "total_size": 680}
    assert sorted(set(index["weight_map"].values())) == [f"model-{n:05d}-of-00007.safetensors" for n in range(1, 8)]
    for name, file in index["weight_map"].items():
        wanted = torch.ones(50) if name == "large" else torch.full((20,), float(name[1:]))
        assert torch.equal(load_file(tmp_path / file)[name], wanted)


def _collect(folder: Path, stages: tuple[int, ...], dtype: str = "fp32") -> list[dict[str, torch.Tensor]]:
    return [worker.full_weights(worker.make_backend(folder, stage, dtype=dtype)) for stage in stages]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen2_moe"])
def test_weights_for_the_engine_have_the_names_and_values_of_the_saved_file_on_every_stage(
    tmp_path: Path, architecture: str
) -> None:
    folder = (
        make_tiny_model(tmp_path / "model", "qwen2") if architecture == "qwen2" else make_tiny_moe(tmp_path / "moe")
    )
    saved = load_file(folder / "model.safetensors")
    for rank, stages in enumerate(worker.run_ranks(_collect, 2, folder, (0, 2, 3))):
        for stage, weights in zip((0, 2, 3), stages, strict=True):
            assert sorted(weights) == sorted(saved), f"rank {rank}, stage {stage}"
            for name, tensor in weights.items():
                assert torch.equal(tensor, saved[name]), f"rank {rank}, stage {stage}: {name}"


def _save_into_full_disk(source: Path, target: Path, limit: int) -> str:
    from openrlhf.backends.distributed import RankError

    messages = []
    for stage in (2, 3):
        backend = worker.make_backend(source, stage)
        with worker.small_disk(limit), pytest.raises(RankError) as caught:
            backend.save_hf(target)
        messages.append(str(caught.value))
    return "\n".join(messages)


def test_a_full_disk_leaves_the_exported_model_of_before_and_every_rank_says_why(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", "qwen2", seed=1)
    target = tmp_path / "target"
    shutil.copytree(make_tiny_model(tmp_path / "old", "qwen2", seed=2), target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    for message in worker.run_ranks(_save_into_full_disk, 2, source, target, 40_000):
        assert f"saving the model to {target} failed on rank 0" in message
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "source", "target"]


def _save_here(source: Path, target: Path) -> None:
    backend = worker.make_backend(source, 3)
    os.chdir(target)
    try:
        backend.save_hf(Path("."))
    finally:
        os.chdir("/")


def test_an_export_touches_nothing_outside_its_folder_which_may_be_the_current_one(tmp_path: Path) -> None:
    # A mount point cannot be renamed onto, and beside it nothing may be writable.
    source = make_tiny_model(tmp_path / "source", "qwen2")
    target = tmp_path / "parent" / "target"
    target.mkdir(parents=True)
    before = target.parent.stat().st_mtime_ns
    worker.run_ranks(_save_here, 2, source, target)
    assert target.parent.stat().st_mtime_ns == before
    assert [path.name for path in target.parent.iterdir()] == ["target"]
    AutoModelForCausalLM.from_pretrained(target)
    assert not list(target.glob(".*"))
