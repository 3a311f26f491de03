"""A dry run asks a real Ray cluster what it has."""

from __future__ import annotations

import json
import re

import pytest
from ray.cluster_utils import Cluster

from openrlhf.cli.common import run_command
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def cluster():
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 3, "num_gpus": 2, "include_dashboard": False, "object_store_memory": 80 * 2**20},
    )
    cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=80 * 2**20)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def words(cluster, tmp_path, monkeypatch):
    make_tiny_model(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"input": "1 + 1 ?"}) + "\n")
    (tmp_path / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': [0.0]}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    return [
        "--actor.model_name_or_path", "./model", "--reward.remote_url", "reward.py", "--data.prompt_dataset",
        "prompts.jsonl", "--algo.advantage.estimator", "reinforce", "--data.max_len", "64", "--ref.num_gpus_per_node",
        "1", "--dry_run",
    ]  # fmt: skip


def test_places_of_all_nodes_count(words, cluster, capsys):
    run_command("train_ppo_ray", None, [*words, "--actor.num_gpus_per_node", "1"])

    assert f"3 GPUs, of 3 on the Ray cluster at {cluster.address}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("device", "said"), [("auto", "4 GPUs, .* has 3"), ("cpu", "5 CPU places, .* has 4")])
def test_too_few_places_are_refused(words, capsys, device, said):
    workers = "2" if device == "auto" else "3"
    with pytest.raises(SystemExit) as caught:
        run_command("train_ppo_ray", None, [*words, "--actor.num_gpus_per_node", workers, "--device", device])

    assert caught.value.code == 2
    assert re.search(f"the run needs {said}; lower --actor.num_gpus_per_node", capsys.readouterr().err)


def test_places_of_a_critic_count_and_its_flag_is_named(words, cluster, capsys):
    flags = ["--actor.num_gpus_per_node", "1", "--critic.num_gpus_per_node", "2", "--algo.advantage.estimator", "gae"]
    with pytest.raises(SystemExit):
        run_command("train_ppo_ray", None, [*words, *flags])
    said = "5 GPUs, and the Ray cluster at .* has 3; lower .*, --critic.num_gpus_per_node or --vllm.num_engines"
    assert re.search(said, capsys.readouterr().err)
    run_command("train_ppo_ray", None, [*words, *flags, "--train.colocate_all", "--critic.num_gpus_per_node", "1"])
    assert "actor + ref + critic + engine 1 GPUs" in " ".join(capsys.readouterr().out.split())
