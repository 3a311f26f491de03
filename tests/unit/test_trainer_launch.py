"""In which order engines start, and how much of a card they may take."""

from __future__ import annotations

from typing import Any

import pytest

from openrlhf.rollout.pool import RolloutPool
from openrlhf.trainer.launch import engine_share, start_engines
from tests.unit.config_args import RL, built

TWO_CARDS = ("--actor.num_gpus_per_node", "2", "--ref.num_gpus_per_node", "2", "--train.colocate_all")


class Recorder:
    """Stands for the supervisor; writes down who is waited for."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def get_all(self, refs: dict[str, Any], *, what: str, timeout: float) -> dict[str, Any]:
        if refs:
            self._log.append(f"wait for {len(refs)}")
        return refs


class Engine:
    """Stands for the handle of an engine's actor."""

    def __init__(self, number: int, log: list[str]) -> None:
        self._number, self._log = number, log
        self.start = self

    def remote(self) -> int:
        self._log.append(f"start {self._number}")
        return self._number


@pytest.mark.parametrize(
    ("flags", "on_gpu", "expected"),
    [
        (("--vllm.num_engines", "2"), True, ["start 0", "start 1"]),
        (
            ("--vllm.num_engines", "4"),
            True,
            ["start 0", "start 1", "wait for 2", "start 2", "start 3"],
        ),
        (("--vllm.num_engines", "4"), False, [f"start {number}" for number in range(4)]),
    ],
    ids=["one each", "two each", "no GPU"],
)
def test_engines_of_one_gpu_start_one_after_the_other(flags: Any, on_gpu: bool, expected: list[str]) -> None:
    log: list[str] = []
    config = built("train_ppo_ray", RL, *TWO_CARDS, *flags)
    recorder: Any = Recorder(log)
    engines = [Engine(number, log) for number in range(config.vllm.num_engines)]
    pool = RolloutPool(engines, recorder, samples_in_flight=1, timeout=1.0)
    ready = start_engines(config, pool, recorder, on_gpu)
    assert log == expected
    assert list(ready.items()) == list(zip(pool.names, range(len(engines)), strict=True))


def test_an_engines_share_of_a_card_is_all_of_it_where_its_cache_is_given_outright() -> None:
    half = (*TWO_CARDS, "--vllm.num_engines", "2", "--vllm.gpu_memory_utilization", "0.5")
    assert engine_share(built("train_ppo_ray", RL, *half)) == 0.5
    both = (*TWO_CARDS, "--vllm.num_engines", "4", "--vllm.gpu_memory_utilization", "0.2")
    assert engine_share(built("train_ppo_ray", RL, *both)) == pytest.approx(0.4)
    for given in ('{"kv_cache_memory_bytes": 1000000}', '{"num_gpu_blocks_override": 100}'):
        assert engine_share(built("train_ppo_ray", RL, *half, "--vllm.extra", given)) == 1
