"""Traces of steps from real runs, which change no number, and a run whose one update gives the old log-probs."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf.trainer.device_meter import Usage
from openrlhf.trainer.flops import ModelFlops
from openrlhf.trainer.supervised_instruments import usage_metrics
from tests.integration import rl_runs as runs
from tests.integration import sft_worker as worker
from tests.integration.backend_worker import run_ranks
from tests.tiny_models import make_tiny_model


def operators(file: Path) -> set[str]:
    """Names of what a trace recorded."""
    return {str(event.get("name")) for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}


def _train_with_and_without_traces(folder: Path, model: Path, data: Path) -> dict[str, Any]:
    losses, said = [], io.StringIO()
    for name, steps in (("never", "50"), ("traced", "2:3"), ("late", "5:99")):
        config = worker.make_config(folder / name, model, data, logger={"profile_steps": steps})
        with contextlib.redirect_stdout(said):
            worker.train_in_place(config)
        losses.append([line["loss/train"] for line in worker.metrics_of(config)])
    return {"losses": losses, "said": said.getvalue()}


def test_supervised_steps_are_traced_on_every_rank_and_come_out_as_without_a_trace(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen3", hidden=128)
    results = run_ranks(_train_with_and_without_traces, 2, tmp_path, model, worker.write_data(tmp_path / "train.jsonl"))
    assert all(losses == results[0]["losses"][0] for losses in results[0]["losses"])
    found = {name: sorted(path.name for path in (tmp_path / name).glob("out/profile/*")) for name in ("traced", "late")}
    for name, steps in (("traced", "2-3"), ("late", "5-6")):
        ranks = [f"train_sft_rank{rank}_steps{steps}" for rank in (0, 1)]
        assert found[name] == [rank + suffix for rank in ranks for suffix in (".json.gz", ".txt")]
    assert not (tmp_path / "never/out/profile").exists()
    for rank in (0, 1):
        assert "aten::mm" in operators(tmp_path / f"traced/out/profile/train_sft_rank{rank}_steps2-3.json.gz")
    assert f"steps 2 to 3 were traced: {tmp_path}/traced/out/profile has" in results[0]["said"]
    assert "profile_steps 50:50 traced nothing: the run ended after step 6" in results[0]["said"]
    assert "traced" not in results[1]["said"]


def _gathered() -> dict[str, float]:
    rank = torch.distributed.get_rank()
    backend: Any = SimpleNamespace(world_size=torch.distributed.get_world_size(), rank=rank)
    assert usage_metrics(backend, Usage(None, 1.0, None, None), [10]) == {}
    return usage_metrics(backend, Usage(2.0 + rank, 1.0 + rank, ModelFlops(60.0, ()), 100.0), [4, 6])


def test_the_fullest_rank_gives_a_supervised_step_its_memory_and_the_slowest_its_utilisation() -> None:
    wanted = {"memory/peak_gib": 3.0, "throughput/mfu": pytest.approx(600 / (2 * 200))}
    assert run_ranks(_gathered, 2) == [wanted, wanted]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_rl_run_of_one_update_a_step_traces_actor_and_critic_and_measures_its_kl_in_the_update(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = make_tiny_model(tmp_path / "model", "qwen2", hidden=128)
    (tmp_path / "reward.py").write_text(runs.REWARD)
    flags = [
        *("--algo.advantage.estimator", "gae", "--critic.num_gpus_per_node", "1", "--actor.num_gpus_per_node", "2"),
        *("--algo.kl.use_loss", "--algo.kl.estimator", "k3", "--train.batch_size", "16"),
        *("--logger.profile_steps", "2:3"),
    ]
    prompts = runs.write_prompts(tmp_path / "prompts.jsonl")
    run = runs.finish(tmp_path, runs.command(tmp_path, model, prompts, tmp_path / "reward.py", *flags))
    assert run.process.returncode == 0, run.text()[-4000:]
    first, _, third = runs.metrics(tmp_path)
    assert all(line["policy/ratio_mean"] == 1 and line["policy/ppo_kl"] == 0 for line in (first, third))
    assert first["kl/reference"] == pytest.approx(0, abs=1e-6) and third["kl/reference"] > 1e-6
    assert third["kl/reference"] == pytest.approx(third["policy/kl_loss"], rel=1e-4)
    assert first["sync/logprob_gap"] < 1e-4 and first["critic/updates"] == first["actor/updates"] == 1
    folder = tmp_path / "out" / "profile"
    names = [f"{part}_steps2-3" for part in ("actor_rank0", "actor_rank1", "critic_rank0")]
    assert sorted(path.name for path in folder.iterdir()) == [n + end for n in names for end in (".json.gz", ".txt")]
    for name in names:
        found = operators(folder / f"{name}.json.gz")
        assert "aten::mm" in found and any("Backward" in operator for operator in found), name
    assert run.text().count("steps 2 to 3 were traced") == 1
