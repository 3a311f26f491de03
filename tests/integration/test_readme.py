"""What the README prints for a laptop is run as it is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.tracking.jsonl import read_jsonl
from tests.integration.test_example_scripts import DPO, HYBRID, REWARD_FN, REWARD_MODEL

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(title: str, language: str) -> list[str]:
    """The code blocks of a chapter."""
    chapter = README.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", chapter, re.DOTALL)


def run_in(folder: Path, commands: str) -> str:
    """Runs the commands one after the other. Returns: what they printed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", commands],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=420,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the fine-tuning for a laptop was run."""
    folder = tmp_path_factory.mktemp("readme")
    (commands,) = (block for block in blocks("Supervised fine-tuning", "bash") if "<<" in block)
    printed = run_in(folder, commands)
    assert "warning" not in printed, printed
    return folder


def test_the_fine_tuning_makes_rows_and_a_model_and_trains_it_as_the_text_says(folder: Path) -> None:
    laptop = folder / "outputs" / "laptop"
    assert len((laptop / "sums.jsonl").read_text().splitlines()) == 20
    out = laptop / "sft"
    losses = [line["loss/train"] for line in read_jsonl(out / "metrics.jsonl")]
    assert 3 < losses[0] < 5 and losses[-1] < 1
    assert (out / "report.html").is_file()
    AutoTokenizer.from_pretrained(out)
    assert 0.7e6 < AutoModelForCausalLM.from_pretrained(out).num_parameters() < 0.9e6


def test_adapters_are_trained_and_merged_into_a_model_that_knows_the_sums_better(folder: Path) -> None:
    laptop = folder / "outputs" / "laptop"
    (command,) = (b for b in blocks("Merging an adapter", "bash") if "outputs/laptop" in b)
    printed = run_in(folder, command)
    assert "warning" not in printed, printed
    losses = [line["loss/train"] for line in read_jsonl(laptop / "sft_lora" / "metrics.jsonl")]
    assert losses[-1] < losses[0]
    before, after = (load_file(laptop / name / "model.safetensors") for name in ("sft", "sft_merged"))
    assert before.keys() == after.keys() and any(not before[name].equal(after[name]) for name in before)


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_reinforcement_learning_trains_that_model_and_a_critic_by_the_printed_agent(folder: Path) -> None:
    laptop = folder / "outputs" / "laptop"
    (agent,) = (b for b in blocks("Reinforcement learning", "python") if b.startswith("# agent.py\n"))
    (laptop / "agent.py").write_text(agent)
    (command,) = (b for b in blocks("Reinforcement learning", "bash") if "outputs/laptop/rl" in b)
    printed = run_in(folder, command)
    assert not re.search("warning|Triton|note:", printed), printed
    assert re.search(r"step 1/2 .* left$", printed, re.MULTILINE) and "step 2/2" in printed
    steps = read_jsonl(laptop / "rl" / "metrics.jsonl")
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["actor/updates"] == line["critic/updates"] == 2 for line in steps)
    assert all(1 < line["extra/turns"] <= 3 and line["reward/failed"] == 0 for line in steps)
    AutoModelForCausalLM.from_pretrained(laptop / "rl")
    # All that was written lies where git does not look.
    assert [path.name for path in folder.iterdir()] == ["outputs"]


def test_the_scripts_that_are_named_for_a_laptop_are_those_that_are_tested() -> None:
    (block,) = (b for b in blocks("Reinforcement learning", "bash") if b.startswith("bash examples"))
    assert block.splitlines() == [f"bash examples/scripts/{name} cpu" for name in (REWARD_FN, HYBRID)]
    for title, name in (("Reward models", REWARD_MODEL), ("DPO and its relatives", DPO)):
        (block,) = (b for b in blocks(title, "bash") if b.startswith("bash examples"))
        assert block == f"bash examples/scripts/{name} cpu\n"
