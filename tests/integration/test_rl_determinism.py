"""Two runs from one seed are one run, and a run without a single reward moves no weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrlhf.tracking.jsonl import read_jsonl
from tests.integration import rl_runs as runs
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BROKEN_REWARD = """
def reward_func(queries, prompts, labels):
    raise RuntimeError("the test machine is down")
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "reward.py").write_text(runs.REWARD)
    (folder / "broken.py").write_text(BROKEN_REWARD)
    return {
        "model": make_tiny_model(folder / "model", "qwen2", hidden=128),
        "prompts": runs.write_prompts(folder / "prompts.jsonl", 8),
        "reward": folder / "reward.py",
        "broken": folder / "broken.py",
    }


def test_two_runs_from_one_seed_agree_bit_for_bit_with_two_engines(inputs: dict[str, Path], tmp_path: Path) -> None:
    flags = ["--train.full_determinism_enable", "--vllm.num_engines", "2", "--rollout.save_samples", "99"]
    results = []
    for name in ("first", "second"):
        folder = tmp_path / name
        run = runs.finish(folder, runs.command(folder, inputs["model"], inputs["prompts"], inputs["reward"], *flags))
        assert run.process.returncode == 0, run.text()[-4000:]
        weights = AutoModelForCausalLM.from_pretrained(folder / "out").state_dict()
        results.append((runs.repeated(runs.metrics(folder)), read_jsonl(folder / "out" / "rollouts.jsonl"), weights))
    (metrics, samples, weights), (other_metrics, other_samples, other_weights) = results

    assert metrics == other_metrics and [line["step"] for line in metrics] == [1, 2]
    assert samples == other_samples and len(samples) == 32
    # Samples of one prompt are drawn, each from a seed of its own.
    assert len({sample["response"] for sample in samples if sample["group_id"] == samples[0]["group_id"]}) > 1
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weight, other_weights[name]) for name, weight in weights.items())
    start = AutoModelForCausalLM.from_pretrained(inputs["model"]).state_dict()
    assert not any(torch.equal(weight, start[name]) for name, weight in weights.items())


def test_a_reward_that_always_fails_ends_the_run_in_a_sentence_and_no_model_is_written(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    weights = {path: path.read_bytes() for path in inputs["model"].iterdir()}
    flags = ["--reward.max_retries", "0", "--ckpt.save_steps", "1", "--ckpt.save_hf"]
    run = runs.finish(tmp_path, runs.command(tmp_path, inputs["model"], inputs["prompts"], inputs["broken"], *flags))
    assert run.process.returncode == 1, run.text()[-4000:]
    last = run.text().strip().splitlines()[-1]
    assert last.startswith("openrlhf train_ppo_ray: none of the 16 samples of step 1 can be trained on"), last
    assert "no weight was moved; 16 of them" in last and "the test machine is down" in last
    assert "Traceback" not in last
    # The model that the run started from is as it was, and nothing that could pass for a result lies beside it.
    assert weights == {path: path.read_bytes() for path in inputs["model"].iterdir()}
    assert list(tmp_path.rglob("*.safetensors")) == [] and list(tmp_path.rglob("global_step*")) == []
    assert runs.metrics(tmp_path) == []
