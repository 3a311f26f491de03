"""The actor's weights on their way to the engines: which transport, how both ends meet, and each update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from openrlhf.config import ConfigError
from openrlhf.rollout.pool import RolloutPool
from openrlhf.rollout.transports import Rendezvous
from openrlhf.trainer.workers import WorkerGroup

Transport = Literal["shm", "ipc", "nccl", "gloo"]

SENDER_SHARE = 0.9
"""Of --train.step_timeout, what the sender of weights waits for one answer of an engine."""


@dataclass(frozen=True)
class Site:
    """Where a process stands.

    Attributes:
        node: Ray's name of it.
        gpu: the card's name that is the same in every process; None on a CPU.
    """

    node: str
    gpu: str | None


def choose_transport(wanted: str, sender: Sequence[Site], workers: Mapping[str, Sequence[Site]]) -> Transport:
    """Picks the way of the weights.

    Args:
        wanted: ``--vllm.sync_backend``; "auto" and the habit, "nccl", take what is fastest where the parts stand.
        sender: the actor's ranks, the one that speaks to the engines first.
        workers: of each engine, by its name.

    Raises: ConfigError where the parts stand so that ``wanted`` cannot connect them.
    """
    flag = f"--vllm.sync_backend {wanted}"
    everyone = [site for engine in workers.values() for site in engine]
    one_node = all(site.node == sender[0].node for site in everyone)
    on_gpu = sender[0].gpu is not None
    own_cards = {site.gpu for site in sender}
    shares_all = on_gpu and all(site.gpu in own_cards for site in everyone)
    apart = on_gpu and all(site.gpu != sender[0].gpu for site in everyone)
    if wanted == "shm":
        if not one_node:
            far = sorted(name for name, sites in workers.items() if any(s.node != sender[0].node for s in sites))
            raise ConfigError(f"{flag}: {', '.join(far)} and actor worker 0 stand on different nodes; take auto.")
        return "shm"
    if wanted == "gloo":
        return "gloo"
    if not on_gpu:
        return "shm" if one_node else "gloo"
    if shares_all:
        return "ipc"
    if wanted == "ipc":
        raise ConfigError(f"{flag}: not every engine stands on a GPU of the actor; take auto, or --train.colocate_all.")
    if apart:
        return "nccl"
    # NCCL takes a card once in a group.
    return "shm" if one_node else "gloo"


class WeightSync:
    """Sends the actor's weights to all engines."""

    def __init__(
        self, actor: WorkerGroup, pool: RolloutPool, *, dtype: torch.dtype, timeout: float, transport: Transport
    ) -> None:
        """
        Args:
            dtype: of the engines' weights.
            timeout: seconds that one phase may take.
        """
        self.transport = transport
        self._actor, self._pool = actor, pool
        self._dtype, self._timeout = dtype, timeout

    def note(self, wanted: str) -> str | None:
        """Returns: a sentence where ``--vllm.sync_backend`` is not what is taken; none for the default on a CPU."""
        default = (wanted, self.transport, self._actor.device) == ("nccl", "shm", "cpu")
        if default or wanted in (self.transport, "auto"):
            return None
        return f"--vllm.sync_backend {wanted} becomes {self.transport}, by where actor and engines stand"

    def connect(self, workers: Mapping[str, Sequence[Site]]) -> None:
        """Has both ends meet.

        Args:
            workers: of each engine, by its name.
        """
        place, calls = None, {}
        readers: dict[str, list[str]] = {}
        for name, sites in workers.items():
            for card in sorted({site.gpu for site in sites if site.gpu is not None}):
                readers.setdefault(card, []).append(name)
        if self.transport in ("nccl", "gloo"):
            address, port = self._actor.call_first("address", timeout=self._timeout)
            place = Rendezvous(address, port, self.transport, 1 + sum(map(len, workers.values())), self._timeout)
            rank = 1
            for name, engine in zip(self._pool.names, self._pool.engines, strict=True):
                calls[name] = engine.join.remote(place, rank)
                rank += len(workers[name])
        for name, worker in zip(self._actor.names, self._actor.workers, strict=True):
            calls[name] = worker.open_sender.remote(self.transport, place, readers)
        # In one wait: an end that fails is named at once, while the other still waits for it.
        self._actor.supervisor.get_all(calls, what="the meeting of sender and engines", timeout=self._timeout)

    def send(self, version: int) -> int:
        """Gives the engines the actor's weights. Returns: bytes sent to each engine."""
        engines = dict(zip(self._pool.names, self._pool.engines, strict=True))
        # The sender gives up first, since it knows which engine it waits for.
        return self._actor.call(
            "send_weights", engines, self._dtype, version, SENDER_SHARE * self._timeout, timeout=self._timeout
        )[0]


def connect_engines(
    wanted: str,
    actor: WorkerGroup,
    ranks: Sequence[Mapping[str, Any]],
    pool: RolloutPool,
    engines: Mapping[str, Mapping[str, Any]],
    *,
    dtype: torch.dtype,
    timeout: float,
) -> WeightSync:
    """Chooses the transport and has both ends meet.

    Args:
        wanted: ``--vllm.sync_backend``.
        ranks: what ``TrainWorker.setup`` told of each rank of the actor.
        engines: what ``RolloutActor.start`` told, by the engine's name.
    """
    sender = [Site(rank["node"], rank["gpu"]) for rank in ranks]
    workers = {name: [Site(told["node"], gpu) for gpu in told["gpus"]] for name, told in engines.items()}
    transport = choose_transport(wanted, sender, workers)
    sync = WeightSync(actor, pool, dtype=dtype, timeout=timeout, transport=transport)
    sync.connect(workers)
    return sync
