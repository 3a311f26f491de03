"""Engines and models that share cards use them in turns: one side's memory is freed while the other works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from openrlhf.rollout.pool import RolloutPool
from openrlhf.trainer.workers import WorkerGroup


class _Engines(Enum):
    ASLEEP, WEIGHTS, AWAKE = range(3)


class DeviceTurns:
    """Whose turn it is. Where nothing sleeps, every change of turns does nothing.

    Engines sleep without keeping their weights, which are new after each update anyway. Weights are sent once the
    memory for them has woken and before that of the cache does: cache and training state never stand side by side.
    """

    def __init__(
        self,
        pool: RolloutPool,
        send: Callable[[int], int],
        *,
        trained: Sequence[WorkerGroup],
        others: Sequence[WorkerGroup],
        engines_sleep: bool,
        training_sleeps: bool,
        engine_share: float,
        timeout: float,
    ) -> None:
        """
        Args:
            send: gives the engines the actor's weights of this version. Returns: bytes.
            trained: groups with an optimizer.
            others: all other groups.
            engines_sleep: engines free their memory while models work; they are asleep now.
            training_sleeps: weights and optimizers of ``trained`` leave the card while engines sample.
            engine_share: of a card's memory, what its engines take together at most.
            timeout: seconds that one change of a part may take.
        """
        self._pool, self._send = pool, send
        self._trained, self._others = list(trained), list(others)
        self._engines_sleep, self._training_sleeps = engines_sleep, training_sleeps
        self._engine_share = engine_share
        self._timeout = timeout
        self._engines = _Engines.ASLEEP if engines_sleep else _Engines.AWAKE
        self._resident = True

    def training(self) -> None:
        """Gives the cards to the models."""
        # Weights that are awake alone were sent a moment ago: whoever saves the models then would have them sent again.
        if self._engines_sleep and self._engines is _Engines.AWAKE:
            self._pool.call("sleep", timeout=self._timeout)
            self._engines = _Engines.ASLEEP
        if not self._resident:
            for group in self._trained:
                group.call("reload", timeout=self._timeout)
            self._resident = True

    @property
    def in_use(self) -> bool:
        """Whether anything ever sleeps."""
        return self._engines_sleep or self._training_sleeps

    def send(self, version: int) -> int:
        """Gives the engines the actor's weights, and the models the cards. Returns: bytes sent to each engine."""
        if not self._resident:
            self.training()
        if self._engines is _Engines.ASLEEP:
            self._pool.call("wake", "weights", timeout=self._timeout)
            self._engines = _Engines.WEIGHTS
        return self._send(version)

    def sampling(self, version: int) -> None:
        """Gives the cards to the engines, which hold the actor's weights then."""
        if self._engines is _Engines.ASLEEP:
            self.send(version)
        if self._training_sleeps and self._resident:
            for group in self._trained:
                group.call("offload", timeout=self._timeout)
            self._resident = False
        if self._engines is _Engines.WEIGHTS:
            for group in [*self._trained, *self._others]:
                group.call("release", self._engine_share, timeout=self._timeout)
            self._pool.call("wake", "kv_cache", timeout=self._timeout)
            self._engines = _Engines.AWAKE
