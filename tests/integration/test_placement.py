"""Who gets which GPUs, on a Ray whose GPUs are numbers only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray._raylet import PlacementGroupID
from ray.util.placement_group import PlacementGroup

from openrlhf.trainer.placement import Place, place_roles
from openrlhf.utils.errors import RunError
from tests.unit.config_args import built

pytestmark = pytest.mark.timeout(180)

GPUS = 4


@pytest.fixture(
    scope="module", autouse=True, params=["0,1,2,3", "GPU-3f,GPU-a1,GPU-07,GPU-c2"], ids=["numbers", "names"]
)
def four_gpus(request: pytest.FixtureRequest) -> Iterator[set[str]]:
    """A Ray that was started where its GPUs are called so. Returns: what they are called."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CUDA_VISIBLE_DEVICES", request.param)
        ray.init(address="local", num_cpus=8, num_gpus=GPUS, include_dashboard=False, object_store_memory=80 * 2**20)
        yield set(request.param.split(","))
        ray.shutdown()


Placing = Callable[..., dict[str, list[Place]]]


@pytest.fixture
def places_of() -> Iterator[Placing]:
    """Reserves places for flags; nothing stays reserved."""
    before = set(ray.util.placement_group_table())

    def place(*flags: str, on_gpu: bool = True) -> dict[str, list[Place]]:
        flags = ("--algo.kl.init_coef", "0", "--algo.advantage.estimator", "rloo", *flags)
        return place_roles(built("train_ppo_ray", {}, *flags), on_gpu=on_gpu)

    yield place
    for name in set(ray.util.placement_group_table()) - before:
        ray.util.remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(name)))


def visible(places: list[Place]) -> list[set[str]]:
    """Returns: the GPUs that a worker at each place sees."""

    @ray.remote
    class Worker:
        def gpus(self) -> str:
            return os.environ["CUDA_VISIBLE_DEVICES"]

    workers: list[Any] = [Worker.options(**place.options()).remote() for place in places]
    found = ray.get([worker.gpus.remote() for worker in workers], timeout=60)
    for worker in workers:
        ray.kill(worker)
    return [set(gpus.split(",")) for gpus in found]


def test_engines_of_several_gpus_stand_on_those_of_the_actor(places_of: Placing, four_gpus: set[str]) -> None:
    places = places_of("--train.colocate_all", "--actor.num_gpus_per_node", "4", "--vllm.num_engines", "2",
                       "--vllm.tensor_parallel_size", "2")  # fmt: skip
    actors, engines = visible(places["actor"]), visible(places["engine"])
    assert len(actors) == 4 and all(len(own) == 1 for own in actors)
    assert set.union(*actors) == set.union(*engines) == four_gpus
    assert [len(own) for own in engines] == [2, 2] and not engines[0] & engines[1]


def test_several_engines_share_each_gpu_of_the_actor(places_of: Placing, four_gpus: set[str]) -> None:
    places = places_of("--train.colocate_all", "--actor.num_gpus_per_node", "4", "--vllm.num_engines", "8")
    together = visible([*places["actor"], *places["engine"]])
    actors, engines = together[:4], together[4:]
    assert set.union(*actors) == four_gpus and all(len(own) == 1 for own in actors)
    # The first four stand on different GPUs, and so do the last four.
    assert engines[:4] == engines[4:] == actors


def test_engines_on_a_cpu_share_its_cores_and_models_have_all(
    places_of: Placing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for engines, threads in ((1, "8"), (3, "2"), (16, "1")):
        shared = ("--train.colocate_all", "--actor.num_gpus_per_node", "1", "--vllm.num_engines", str(engines))
        places = places_of(*shared, on_gpu=False)
        taken = [place.options()["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] for place in places["engine"]]
        assert taken == [threads] * engines
        assert places["actor"][0].options()["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "8"


def test_engines_of_several_gpus_have_them_for_themselves_apart_from_the_actor(places_of: Placing) -> None:
    places = places_of("--actor.num_gpus_per_node", "2", "--vllm.num_engines", "1", "--vllm.tensor_parallel_size", "2")
    actors, (engine,) = visible(places["actor"]), visible(places["engine"])
    assert len(set.union(*actors)) == 2 == len(engine) and not set.union(*actors) & engine


def test_engines_of_one_gpu_are_counted_by_ray(places_of: Placing) -> None:
    places = places_of("--actor.num_gpus_per_node", "2", "--vllm.num_engines", "2")
    assert [place.cards for place in places["engine"]] == [(), ()]
    assert len(set.union(*visible(places["actor"]), *visible(places["engine"]))) == 4


def test_more_gpus_than_there_are_is_an_error_that_says_what_there_is(
    places_of: Placing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openrlhf.trainer.placement._PLACEMENT_TIMEOUT_S", 2.0)
    with pytest.raises(RunError, match=r"engine need 6 GPUs, the Ray cluster has .*'GPU': 4"):
        places_of("--actor.num_gpus_per_node", "1", "--vllm.num_engines", "3", "--vllm.tensor_parallel_size", "2")
