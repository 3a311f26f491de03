"""The training benchmark runs on a CPU too, and counts the operations that PyTorch counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks.train_throughput import model_config, work_of_step

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_the_training_benchmark_prints_one_line_of_json_and_writes_a_profile(tmp_path: Path) -> None:
    sizes = {"size": "toy", "row_tokens": 16, "micro_tokens": 64, "step_tokens": 128, "steps": 1, "warmup_steps": 1}
    flags = {**sizes, "device": "cpu", "profile": tmp_path / "kernels.txt"}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    done = subprocess.run(
        [sys.executable, "benchmarks/train_throughput.py", *words, "--gradient_checkpointing"],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["step_tokens"] == 128 and found["zero_stage"] == 2 and found["packed"]
    assert found["attention"] == "segment_sdpa" and found["gradient_checkpointing"]
    assert found["tokens_per_s"] == pytest.approx(128 / found["seconds_per_step"], rel=0.01)
    assert 0 < found["optimizer_seconds"] < found["seconds_per_step"]
    # Nothing is known of this device's peak.
    assert found["mfu"] is found["hfu"] is None
    assert found["loss"] == pytest.approx(torch.tensor(512.0).log().item(), rel=0.05)
    assert "aten::mm" in (tmp_path / "kernels.txt").read_text()


def _counted(checkpointing: bool, lengths: list[int]) -> int:
    """Operations that PyTorch counts in forward and backward, row by row, under attention that writes out all pairs."""
    model = AutoModelForCausalLM.from_config(model_config("toy"), attn_implementation="eager").train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    with FlopCounterMode(display=False) as counter:
        for length in lengths:
            model(torch.arange(length)[None], use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


def test_operations_are_those_that_pytorch_counts_without_the_half_of_attention_that_is_masked() -> None:
    lengths = [300, 100]
    config = model_config("toy")
    model = AutoModelForCausalLM.from_config(config)
    masked = 2 * config.num_hidden_layers * config.hidden_size * sum(length**2 for length in lengths)
    head_again = 2 * config.vocab_size * config.hidden_size * sum(lengths)

    plain = work_of_step(model, lengths, checkpointing=False)
    assert plain.model + 3 * masked == pytest.approx(_counted(False, lengths), rel=0.02)
    assert plain.hardware == plain.model + head_again

    again = work_of_step(model, lengths, checkpointing=True)
    assert again.model == plain.model
    # PyTorch's own forward keeps its logits, and so computes the head once; a layer is not computed again beyond the
    # last tensor that its backward reads, the input of the last product.
    assert again.hardware - head_again + 4 * masked == pytest.approx(_counted(True, lengths), rel=0.04)


def test_an_input_embedding_of_its_own_is_looked_up_and_not_multiplied() -> None:
    untied = model_config("toy")
    untied.tie_word_embeddings = False
    models = [AutoModelForCausalLM.from_config(config) for config in (model_config("toy"), untied)]
    embedding = untied.vocab_size * untied.hidden_size
    tied_size, untied_size = (sum(parameter.numel() for parameter in model.parameters()) for model in models)
    assert untied_size == tied_size + embedding
    tied_work, untied_work = (work_of_step(model, [10], checkpointing=False) for model in models)
    assert tied_work == untied_work
