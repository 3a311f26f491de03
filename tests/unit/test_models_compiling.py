"""Compiled decoder layers compute what the layers compute, under their own names; their graphs serve every batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from openrlhf.config import ConfigError
from openrlhf.data.packed_batch import PackedBatch, pack_rows
from openrlhf.models import compiling
from openrlhf.models.compiling import compile_layers, decoder_layers
from openrlhf.models.forward import score_tokens
from openrlhf.models.loading import load_causal_lm
from tests.tiny_models import make_tiny_model

LAYERS = 6


def _batch(*lengths: int) -> PackedBatch:
    rows = [(torch.arange(length) * 7919 + length) % 512 for length in lengths]
    return pack_rows(rows, [torch.arange(length) > 0 for length in lengths])


def _scores(model: torch.nn.Module, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logprobs = score_tokens(model, batch).logprobs
    names, parameters = zip(*model.named_parameters(), strict=True)
    return logprobs.detach(), dict(zip(names, torch.autograd.grad(logprobs.sum(), parameters), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "mistral", layers=LAYERS)


def _load(folder: Path, checkpointing: bool = False) -> torch.nn.Module:
    return load_causal_lm(folder, dtype=torch.float32, device="cpu", gradient_checkpointing=checkpointing).train()


def test_compiled_layers_give_the_same_log_probs_and_gradients_and_make_no_graph_twice(folder: Path) -> None:
    torch.compiler.reset()
    counters.clear()
    plain, compiled = _load(folder), _load(folder)
    compile_layers(compiled)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    graphs = []
    for lengths in ((7, 11), (20, 3, 5), (13, 14, 15, 9), (5, 5, 5, 5, 5)):
        expected, found = _scores(plain, _batch(*lengths)), _scores(compiled, _batch(*lengths))
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=2e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0, "nothing was compiled"
    # The first batch may have been special by chance; from then on neither lengths nor their number matter.
    assert graphs[1] == graphs[-1]
    # All layers share their graphs.
    assert graphs[0] < LAYERS

    checkpointed = _load(folder, checkpointing=True)
    compile_layers(checkpointed)
    expected, found = _scores(plain, _batch(7, 11)), _scores(checkpointed, _batch(7, 11))
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "gemma3", "qwen2_moe"])
def test_decoder_layers_are_found_in_every_family(architecture: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, architecture, layers=LAYERS)
    model = _load(tmp_path)
    assert decoder_layers(model) == list(model.model.layers)


def test_what_cannot_be_compiled_is_said_in_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--ds.torch_compile finds no decoder layers in a Linear; leave the flag out"):
        compile_layers(torch.nn.Linear(2, 2))
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="--ds.torch_compile needs a C\\+\\+ compiler.*install g"):
        compile_layers(_load(folder))
