"""Engines and models that share cards: who frees what, in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf.trainer.turns import DeviceTurns
from openrlhf.trainer.workers import TrainWorker


class Recorder:
    """Stands for the pool and for a group; writes down what it is asked."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def call(self, method: str, *args: Any, timeout: float) -> None:
        self._log.append(" ".join([self._name, method, *map(str, args)]))


def turns_of(*, engines: bool, training: bool) -> tuple[DeviceTurns, list[str]]:
    log: list[str] = []

    def send(version: int) -> int:
        log.append(f"send {version}")
        return 7

    parts: Any = {
        "pool": Recorder("engines", log),
        "trained": [Recorder("actor", log)],
        "others": [Recorder("ref", log)],
    }
    turns = DeviceTurns(
        send=send, engines_sleep=engines, training_sleeps=training, engine_share=0.4, timeout=1.0, **parts
    )
    return turns, log


WAKING = ["actor release 0.4", "ref release 0.4", "engines wake kv_cache"]


def one_step(turns: DeviceTurns, version: int) -> None:
    turns.sampling(version)
    turns.training()
    assert turns.send(version + 1) == 7


def test_where_nothing_sleeps_weights_are_sent_and_nothing_else_happens() -> None:
    turns, log = turns_of(engines=False, training=False)
    turns.send(0)
    one_step(turns, 0)
    one_step(turns, 1)
    assert log == ["send 0", "send 1", "send 2"] and not turns.in_use


def test_weights_are_sent_between_the_waking_of_their_memory_and_that_of_the_cache() -> None:
    turns, log = turns_of(engines=True, training=True)
    turns.send(0)
    one_step(turns, 0)
    assert log == [
        "engines wake weights", "send 0", "actor offload", *WAKING,
        "engines sleep", "actor reload", "engines wake weights", "send 1",
    ]  # fmt: skip
    assert turns.in_use


def test_engines_alone_can_sleep() -> None:
    turns, log = turns_of(engines=True, training=False)
    turns.send(0)
    one_step(turns, 0)
    assert log == ["engines wake weights", "send 0", *WAKING, "engines sleep", "engines wake weights", "send 1"]


def test_training_alone_can_leave_the_card() -> None:
    turns, log = turns_of(engines=False, training=True)
    turns.send(0)
    one_step(turns, 0)
    assert log == ["send 0", "actor offload", "actor reload", "send 1"]


def test_engines_that_slept_without_an_update_get_the_weights_again() -> None:
    turns, log = turns_of(engines=True, training=True)
    turns.send(0)
    turns.sampling(0)
    turns.training()
    del log[:]
    turns.sampling(0)
    assert log == ["engines wake weights", "send 0", "actor offload", *WAKING]


def test_models_that_are_saved_after_an_update_cost_no_second_transfer() -> None:
    turns, log = turns_of(engines=True, training=True)
    turns.send(0)
    one_step(turns, 0)
    del log[:]
    turns.training()
    turns.sampling(1)
    assert log == ["actor offload", *WAKING]


def test_a_turn_that_is_taken_twice_does_nothing_the_second_time() -> None:
    turns, log = turns_of(engines=True, training=True)
    turns.send(0)
    turns.sampling(0)
    count = len(log)
    turns.sampling(0)
    assert len(log) == count
    turns.training()
    count = len(log)
    turns.training()
    assert len(log) == count


@pytest.mark.parametrize("engines", [False, True])
def test_weights_that_are_wanted_while_engines_sample_come_from_models_on_the_card(engines: bool) -> None:
    turns, log = turns_of(engines=engines, training=True)
    turns.send(0)
    turns.sampling(0)
    del log[:]
    turns.send(0)
    assert log.index("actor reload") < log.index("send 0")


@pytest.mark.parametrize(("device", "free", "gives_back"), [("cuda", 39, True), ("cuda", 40, False), ("cpu", 0, False)])
def test_a_worker_keeps_its_unused_memory_where_the_engines_have_enough(
    device: str, free: int, gives_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 100))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append("cache"))
    worker = TrainWorker.__new__(TrainWorker)
    worker._backend = SimpleNamespace(device=torch.device(device))
    worker.release(0.4)
    assert bool(given) == gives_back
