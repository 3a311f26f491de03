"""Weights on their way out of a model: cut into buckets and files, and states that are converted ahead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from openrlhf.backends.checkpoints import COMPLETE
from openrlhf.backends.convert import convert, newest_states
from openrlhf.backends.shards import ShardWriter
from openrlhf.backends.weights import buckets
from openrlhf.config import ConfigError

WEIGHTS = [
    ("model.embed_tokens.weight", 50),
    ("model.layers.0.mlp.gate_proj.weight", 40),
    ("model.layers.0.mlp.up_proj.weight", 40),
    ("model.layers.0.mlp.down_proj.weight", 40),
    ("model.layers.0.input_layernorm.weight", 1),
    ("lm_head.weight", 50),
]


@pytest.mark.parametrize("limit", [1, 60, 91, 1000])
def test_weights_that_may_be_written_as_one_are_never_in_two_buckets(limit: int) -> None:
    found = list(buckets(WEIGHTS, name=lambda item: item[0], size=lambda item: item[1], limit=limit))
    assert [item for bucket in found for item in bucket] == WEIGHTS
    holding = [bucket for bucket in found if any(".mlp." in name for name, _ in bucket)]
    assert len(holding) == 1
    # No bucket without need: two neighbours would be over the limit together.
    sizes = [sum(size for _, size in bucket) for bucket in found]
    assert all(
        first + WEIGHTS[0][1] > limit or first + second > limit for first, second in zip(sizes, sizes[1:], strict=False)
    )


def test_a_second_tensor_of_one_name_is_refused_in_the_same_file_and_in_a_later_one(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, max_bytes=16)
    writer.add("a", torch.ones(2))
    with pytest.raises(ValueError, match="the weight a was written already"):
        writer.add("a", torch.zeros(2))
    writer.add("b", torch.ones(4))
    writer.add("c", torch.ones(4))
    with pytest.raises(ValueError, match="the weight a was written already"):
        writer.add("a", torch.zeros(2))
    writer.finish(parameters=10)
    assert torch.equal(load_file(tmp_path / "model-00001-of-00003.safetensors")["a"], torch.ones(2))


def make_state(folder: Path, optimizer: str = "AdamW") -> Path:
    folder.mkdir(parents=True)
    (folder / COMPLETE).write_text(json.dumps({"ranks": 2, "ZeRO stage": 2, "optimizer": optimizer}))
    return folder


def test_of_actor_and_critic_the_newest_step_that_both_have_is_converted(tmp_path: Path) -> None:
    for role, steps in (("_actor", (1, 2)), ("_critic", (1, 2, 3))):
        for step in steps:
            make_state(tmp_path / role / f"global_step{step}")
    expected = [tmp_path / role / "global_step2" for role in ("_actor", "_critic")]
    assert newest_states(tmp_path) == expected
    assert newest_states(expected[0]) == expected[:1]
    with pytest.raises(ConfigError, match="holds no complete state"):
        newest_states(tmp_path / "_actor" / "none")


def test_an_actor_without_a_critic_is_converted_alone(tmp_path: Path) -> None:
    state = make_state(tmp_path / "_actor" / "global_step4")
    assert newest_states(tmp_path) == [state]


def test_a_state_of_muon_is_refused_before_the_converter_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="written with --optim muon, whose state cannot be converted"):
        convert(make_state(tmp_path / "global_step1", "MuonWithAdamW"))
