"""A run on Ray: no death and no hang goes unnamed, engines are kept busy, and what the user has set is kept."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError

from openrlhf.config.errors import ConfigError
from openrlhf.data.prompts import PromptRecord
from openrlhf.rollout.actor import GroupRequest, Sampling
from openrlhf.rollout.pool import RolloutPool
from openrlhf.trainer.cluster import ray_started
from openrlhf.trainer.placement import Place
from openrlhf.utils.errors import RunError
from openrlhf.utils.supervise import Supervisor
from tests.integration.ray_workers import ScriptedActor, Worker

LONG = 300.0
"""Seconds that nothing here should ever wait for."""

SOON = 30.0
"""Seconds within which a death has to be named on a busy machine."""


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        logging_level="ERROR",
        log_to_driver=False,
    )
    yield
    ray.shutdown()


class Crew(SimpleNamespace):
    """Two watched workers, ``first`` and ``second``, their process ids, and their supervisor."""


def _crew(first: Any, second: Any) -> Crew:
    supervisor = Supervisor()
    supervisor.watch("first", first.watch.remote())
    supervisor.watch("second", second.watch.remote())
    pids = ray.get([first.pid.remote(), second.pid.remote()], timeout=60)
    return Crew(first=first, second=second, pids=pids, supervisor=supervisor)


@pytest.fixture(scope="module")
def crew(local_ray: None) -> Crew:
    """For tests that let both of them live."""
    return _crew(Worker.remote(), Worker.remote())


@pytest.fixture
def mortal(crew: Crew) -> Crew:
    """For tests that let ``second`` die."""
    return _crew(crew.first, Worker.remote())


def test_results_come_by_name_whichever_is_ready_first(crew: Crew) -> None:
    refs = {"first": crew.first.after.remote(0.5, "a"), "second": crew.second.after.remote(0.0, "b")}

    assert crew.supervisor.get_all(refs, what="a letter", timeout=60) == {"first": "a", "second": "b"}
    assert crew.supervisor.get(crew.first.after.remote(0, 7), name="first", what="a number", timeout=60) == 7
    assert crew.supervisor.get_all({}, what="nothing", timeout=60) == {}


def test_any_wait_gives_all_that_is_ready_and_nothing_else(crew: Crew) -> None:
    quick = [crew.first.after.remote(0, 1), crew.first.after.remote(0, 2)]
    slow = crew.second.after.remote(LONG, 3)
    ray.wait(quick, num_returns=2, timeout=60)

    assert set(crew.supervisor.wait_any([slow, *quick], what=lambda: "numbers", timeout=60)) == set(quick)


@pytest.mark.parametrize("waited_for", ["first", "second", "both"])
def test_a_worker_that_dies_is_named_within_seconds_whoever_is_waited_for(mortal: Crew, waited_for: str) -> None:
    mortal.second.die.remote(0.3)
    refs = {name: getattr(mortal, name).after.remote(LONG, 0) for name in ("first", "second")}
    start = time.monotonic()

    with pytest.raises(RunError, match=f"^second died: its process {mortal.pids[1]} was killed, crashed or ran out of"):
        mortal.supervisor.get_all(
            refs if waited_for == "both" else {waited_for: refs[waited_for]}, what="the end", timeout=LONG
        )

    assert time.monotonic() - start < SOON


def test_a_worker_that_died_before_the_wait_is_named_too(mortal: Crew) -> None:
    os.kill(mortal.pids[1], signal.SIGKILL)
    ray.wait([mortal.second.after.remote(0, 0)], timeout=60)

    with pytest.raises(RunError, match="^second died"):
        mortal.supervisor.get(mortal.first.after.remote(LONG, 0), name="first", what="the end", timeout=LONG)


@pytest.mark.parametrize("order", [["first", "second"], ["second", "first"]], ids=" asked before ".join)
def test_the_dead_worker_is_blamed_and_not_the_one_that_failed_because_of_it(
    mortal: Crew, order: Sequence[str]
) -> None:
    refs = {"first": mortal.first.lose.remote(mortal.pids[1]), "second": mortal.second.die.remote(0.3)}

    with pytest.raises(RunError, match="^second died"):
        mortal.supervisor.get_all({name: refs[name] for name in order}, what="the gradient", timeout=LONG)


def test_a_call_that_raises_gives_its_cause_in_one_line(crew: Crew) -> None:
    refs = {"first": crew.first.after.remote(LONG, 0), "second": crew.second.fail.remote("the disk is full", OSError)}

    with pytest.raises(RunError, match="^second failed: OSError: the disk is full$") as caught:
        crew.supervisor.get_all(refs, what="the export", timeout=LONG)

    assert isinstance(caught.value.__cause__, RayTaskError)
    assert isinstance(caught.value.__cause__.cause, OSError)


def test_a_message_that_a_worker_wrote_for_the_user_is_passed_on_as_it_is(crew: Crew) -> None:
    call = crew.first.fail.remote("rollout engine 0 did not take the weights", RunError)

    with pytest.raises(RunError, match="^first failed: rollout engine 0 did not take the weights$"):
        crew.supervisor.get(call, name="first", what="the transfer", timeout=LONG)


@pytest.mark.parametrize("both", [False, True], ids=["alone", "while another one dies"])
def test_a_setting_that_a_worker_cannot_use_is_told_as_such_and_names_no_worker(mortal: Crew, both: bool) -> None:
    refs = {"first": mortal.first.fail.remote("--data.max_len 9 is too long; lower it.", ConfigError)}
    if both:
        # Its death is no answer to what the user has to change.
        ray.wait([refs["first"]], timeout=60)
        mortal.second.die.remote(0.0)

    with pytest.raises(ConfigError, match=r"^--data.max_len 9 is too long; lower it.$") as caught:
        mortal.supervisor.result(refs["first"], "first")

    assert type(caught.value) is ConfigError
    assert isinstance(caught.value.__cause__, RayTaskError)
    if not both:
        with pytest.raises(ConfigError, match=r"^--data.max_len 9"):
            mortal.supervisor.get_all(refs, what="its setup", timeout=LONG)


def test_a_wait_that_takes_too_long_names_what_and_whom(crew: Crew) -> None:
    refs = {
        "second": crew.second.after.remote(LONG, 0),
        "first": crew.first.after.remote(0.0, 0),
        "third": crew.first.after.remote(LONG, 0),
    }
    start = time.monotonic()

    with pytest.raises(RunError, match="^waited [0-9.]+ s for the end of update from second, third in vain$"):
        crew.supervisor.get_all(refs, what="the end of update", timeout=2.0)

    assert time.monotonic() - start < SOON


def test_a_timeout_is_told_as_it_was_given(crew: Crew) -> None:
    refs = {"first": crew.first.after.remote(0.5, 0), "second": crew.second.after.remote(LONG, 0)}

    with pytest.raises(RunError, match="^waited 3 s for the end from second"):
        crew.supervisor.get_all(refs, what="the end", timeout=3.0)


def test_a_watching_call_that_returns_is_an_error_of_its_own(crew: Crew) -> None:
    supervisor = Supervisor()
    supervisor.watch("first", crew.first.watch.remote())
    supervisor.watch("second", crew.second.resign.remote())

    with pytest.raises(RunError, match="^second ended by itself$"):
        supervisor.get(crew.first.after.remote(LONG, 0), name="first", what="the end", timeout=LONG)


def _requests(sizes: Sequence[int]) -> list[GroupRequest]:
    sampling = Sampling(1.0, 1.0, 4, None, False)
    return [
        GroupRequest(group, PromptRecord(f"prompt {group}", f"label {group}", "test", templated=False), size, sampling)
        for group, size in enumerate(sizes)
    ]


@pytest.fixture(scope="module")
def engines(local_ray: None) -> list[Any]:
    """For tests that let both of them live; warm, so that the script alone decides who is slow."""
    engines = [ScriptedActor.remote() for _ in range(2)]
    list(_pool(engines, [{}, {}]).stream(deque(_requests([1] * 4))))
    return engines


def _pool(
    engines: Sequence[Any],
    faults: Sequence[dict[int, str]] = ({}, {}),
    *,
    seconds: Sequence[float] = (0.0, 0.0),
    limit: int = 8,
    timeout: float = 60.0,
) -> RolloutPool:
    ray.get([e.follow.remote(s, f) for e, s, f in zip(engines, seconds, faults, strict=True)], timeout=60)
    supervisor = Supervisor()
    pool = RolloutPool(engines, supervisor, samples_in_flight=limit, timeout=timeout)
    for name, engine in zip(pool.names, engines, strict=True):
        supervisor.watch(name, engine.watch.remote())
    return pool


def _seen(engines: Sequence[Any]) -> list[tuple[list[int], int]]:
    """Returns: of each engine, its groups and the most samples it had at once."""
    return ray.get([engine.seen.remote() for engine in engines], timeout=60)


def test_every_group_comes_once_and_whole_as_soon_as_it_is_finished(engines: list[Any]) -> None:
    sizes = [4, 1, 3, 2, 8, 1, 4, 16, 2, 5]
    stream = _pool(engines, [{0: "hold"}] * 2, seconds=(0.01, 0.05)).stream(deque(_requests(sizes)))

    groups = [next(stream) for _ in sizes[1:]]
    ray.get([engine.release.remote() for engine in engines], timeout=60)
    groups += stream

    order = [group[0].group_id for group in groups]
    assert order[-1] == 0 and sorted(order) == list(range(len(sizes)))
    for group in groups:
        number = group[0].group_id
        assert [(t.group_id, t.sample_id) for t in group] == [(number, sample) for sample in range(sizes[number])]
        assert {(t.prompt, t.label) for t in group} == {(f"prompt {number}", f"label {number}")}


def test_a_faster_engine_gets_more_of_the_work(engines: list[Any]) -> None:
    done = list(_pool(engines, seconds=(0.0, 0.5), limit=4).stream(deque(_requests([2] * 24))))
    (fast, _), (slow, _) = _seen(engines)

    assert len(done) == 24 and sorted(fast + slow) == list(range(24))
    assert len(fast) > 2 * len(slow) >= 4


def test_the_next_group_goes_where_the_fewest_samples_are_unfinished(engines: list[Any]) -> None:
    # One large group weighs as much as several small ones.
    list(_pool(engines, limit=100).stream(deque(_requests([9, 2, 2, 2, 2, 2]))))
    (first, _), (second, _) = _seen(engines)

    assert (sorted(first), sorted(second)) == ([0], [1, 2, 3, 4, 5])


def test_an_engine_never_holds_more_samples_than_it_was_promised(engines: list[Any]) -> None:
    list(_pool(engines, seconds=(0.02, 0.01), limit=6).stream(deque(_requests([2, 4, 3, 1, 5, 6, 2, 2, 4, 1, 3]))))

    assert all(0 < most <= 6 for _, most in _seen(engines))


def test_a_group_above_the_limit_is_sampled_alone(engines: list[Any]) -> None:
    pool = _pool(engines[:1], [{}], seconds=[0.02], limit=4)

    assert len(list(pool.stream(deque(_requests([9, 2, 9]))))) == 3
    assert _seen(engines[:1])[0][1] == 9


def test_a_pool_serves_one_stream_after_the_other(engines: list[Any]) -> None:
    pool = _pool(engines)

    assert list(pool.stream(deque())) == []
    for _ in range(3):
        assert sorted(group[0].group_id for group in pool.stream(deque(_requests([1] * 7)))) == list(range(7))


def test_groups_that_do_not_finish_are_named_with_their_engines(engines: list[Any]) -> None:
    pool = _pool(engines, [{}, {1: "hold"}], timeout=4.0)

    said = re.escape("waited 4 s for 1 unfinished groups (first: [1]) of rollout engine 1 in vain")
    with pytest.raises(RunError, match=said):
        list(pool.stream(deque(_requests([1, 1, 1]))))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise", "^rollout engine 1 failed: the context is full$"),
        ("die", "^rollout engine 1 died: its process [0-9]+ was killed, crashed or ran out of memory"),
    ],
)
def test_an_engine_that_fails_in_the_middle_is_named_and_nothing_hangs(
    engines: list[Any], fault: str, said: str
) -> None:
    used = [engines[0], ScriptedActor.remote()]
    # Nothing else ever finishes, so that the fault alone can end the wait.
    pool = _pool(used, [{0: "hold", 2: "hold"}, {1: fault}], limit=2, timeout=LONG)
    start = time.monotonic()

    with pytest.raises(RunError, match=said):
        list(pool.stream(deque(_requests([2, 2, 2]))))

    assert time.monotonic() - start < SOON


def test_a_ray_that_is_running_is_neither_started_again_nor_ended() -> None:
    job, address = ray.get_runtime_context().get_job_id(), ray.get_runtime_context().gcs_address
    resources = ray.cluster_resources()

    with ray_started(logical_cpus=64):
        pass
    assert ray.is_initialized()
    assert (ray.get_runtime_context().get_job_id(), ray.get_runtime_context().gcs_address) == (job, address)
    assert ray.cluster_resources() == resources


@pytest.fixture(scope="module")
def place(local_ray: None) -> Place:
    group = ray.util.placement_group([{"CPU": 1}])
    ray.get(group.ready(), timeout=60)
    return Place(group, 0, 0.25, on_gpu=False)


def test_a_worker_has_what_the_user_has_set_and_the_defaults_elsewhere(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "")
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    names = ["NCCL_DEBUG", "VLLM_LOGGING_LEVEL", "TORCH_CPP_LOG_LEVEL", "PYTHONUNBUFFERED"]

    worker = Worker.options(**place.options()).remote()

    found = ray.get(worker.variables.remote(names), timeout=60)
    assert found == dict(zip(names, ["INFO", "", "ERROR", "1"], strict=True))


JOB = """
import json, ray
from openrlhf.trainer.cluster import ray_started
from openrlhf.trainer.placement import Place
from tests.integration.ray_workers import Worker

with ray_started(logical_cpus=1):
    group = ray.util.placement_group([{"CPU": 1}])
    ray.get(group.ready(), timeout=60)
    worker = Worker.options(**Place(group, 0, 0.5, on_gpu=False).options()).remote()
    print(json.dumps(ray.get(worker.variables.remote(["NCCL_DEBUG", "TEAM", "TORCH_CPP_LOG_LEVEL"]), timeout=60)))
"""


def test_a_submitted_job_keeps_the_variables_of_its_runtime_environment(tmp_path: Path) -> None:
    # What `ray job submit --runtime-env-json` does for the process that it starts.
    variables = {"NCCL_DEBUG": "INFO", "TEAM": "blue"}
    env = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"} | variables
    env |= {
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"env_vars": variables}}),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }

    done = subprocess.run(
        [sys.executable, "-c", JOB], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found == {"NCCL_DEBUG": "INFO", "TEAM": "blue", "TORCH_CPP_LOG_LEVEL": "ERROR"}
