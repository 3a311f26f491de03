"""A trainer's side of a weight update: every bucket to every engine, and the manifest that closes it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from openrlhf.rollout.integrity import TransferError
from openrlhf.rollout.transfer import buckets
from openrlhf.rollout.transports import Look, Sender
from openrlhf.utils.errors import RunError
from openrlhf.utils.supervise import describe


def send_weights(
    parameters: Iterable[tuple[str, torch.Tensor]],
    sender: Sender,
    engines: dict[str, Any],
    dtype: torch.dtype,
    version: int,
    *,
    leads: bool,
    timeout: float,
) -> int:
    """Hands a whole model to the engines, bucket by bucket; every rank of the trainer calls it.

    Args:
        parameters: HF names with whole tensors, gathered by all ranks together.
        engines: handles of ``RolloutActor`` by name.
        leads: this rank speaks to the engines: exactly one does.
        timeout: seconds that an engine may take for one bucket.

    Returns: bytes sent to each engine, 0 on the ranks that do not lead.

    Raises:
        RunError: an engine did not take the weights.
        TransferError: the trainer offered a weight twice.
    """
    if not leads and not sender.every_rank:
        for _ in parameters:
            pass
        return 0
    manifest: dict[str, int] = {}
    nbytes = 0
    try:
        if leads:
            on_all(engines, "begin_update", timeout=timeout)
        for tensors in buckets(parameters, dtype, sender.bucket_bytes):
            offer = sender.put(tensors)
            if leads:
                again = sorted(manifest.keys() & offer.checksums.keys())
                if again:
                    raise TransferError(f"the trainer offered {again[0]} twice in one update")
                calls = {
                    name: engine.load_bucket.remote(offer.payload_for(name), offer.checksums)
                    for name, engine in engines.items()
                }
                sender.deliver(_failures(calls, timeout))
                _wait(calls, timeout)
                manifest.update(offer.checksums)
                nbytes += offer.nbytes
            sender.release()
        if leads:
            on_all(engines, "end_update", manifest, version, timeout=timeout)
    finally:
        sender.close()
    return nbytes


def on_all(engines: dict[str, Any], method: str, *args: Any, timeout: float) -> None:
    """Calls ``method`` on every engine at once and waits. Raises: RunError, naming the engine that failed."""
    _wait(_ask(engines, method, *args), timeout)


def _ask(engines: dict[str, Any], method: str, *args: Any) -> dict[str, Any]:
    return {name: getattr(engine, method).remote(*args) for name, engine in engines.items()}


def _failures(calls: dict[str, Any], timeout: float) -> Look:
    """Returns: what raises RunError, naming the engine, where a call has failed or is not done in time."""
    deadline = time.monotonic() + timeout

    def look() -> None:
        done, late = ray.wait(list(calls.values()), num_returns=len(calls), timeout=0)
        names = {call: name for name, call in calls.items()}
        _wait({names[call]: call for call in done}, timeout)
        if late and time.monotonic() > deadline:
            waited_for = ", ".join(names[call] for call in late)
            raise RunError(f"{waited_for} did not take the weights within {timeout:.0f} s")

    return look


def _wait(calls: dict[str, Any], timeout: float) -> None:
    """Waits for all calls, and for none of them once one has failed: the others may be waiting for that engine."""
    names = {call: name for name, call in calls.items()}
    deadline = time.monotonic() + timeout
    while names:
        done, _ = ray.wait(list(names), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            raise RunError(f"{', '.join(names.values())} did not take the weights within {timeout:.0f} s")
        for call in done:
            name = names.pop(call)
            try:
                ray.get(call)
            except RayError as error:
                raise RunError(f"{name} did not take the weights: {describe(error)}") from error
