"""RL over two Ray nodes: weights reach an engine that shares no memory with the actor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from openrlhf.tracking.jsonl import read_jsonl
from tests.integration import rl_runs as runs
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(600)

# Shared memory of each node, in bytes.
STORE = 80 * 2**20


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two nodes on this machine with room for one worker each, so that an engine and an actor stand apart."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    node = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(num_cpus=1, object_store_memory=STORE)
        cluster.wait_for_nodes(60)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
    finally:
        cluster.shutdown()


def test_an_engine_on_another_node_follows_the_actor(two_nodes: Cluster, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2", hidden=128)
    prompts = runs.write_prompts(tmp_path / "prompts.jsonl", 8)
    (tmp_path / "reward.py").write_text(runs.REWARD)
    flags = ["--algo.kl.init_coef", "0", "--vllm.sync_backend", "auto"]
    run = runs.finish(tmp_path, runs.command(tmp_path, model, prompts, tmp_path / "reward.py", *flags))
    assert run.process.returncode == 0, run.text()[-3000:]
    lines = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert len(lines) == 2 and all(line["actor/updates"] == 2 and line["sync/bytes"] > 0 for line in lines)
    # Probes are sampled after a transfer: without one, the second step's gap would show the first step's updates.
    assert max(line["sync/logprob_gap"] for line in lines) < 1e-4
