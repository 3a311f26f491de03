"""The ranks of one model as Ray actors, and the group that the controller talks to."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from openrlhf.backends.base import Backend
from openrlhf.config import DeepSpeedConfig, OptimizerConfig
from openrlhf.data.packed_batch import PackedBatch
from openrlhf.rollout.transfer import Exchange, buckets, write_bucket
from openrlhf.trainer.cluster import Place
from openrlhf.trainer.policy_update import PolicyLossSpec, RankResult, StepShare, update_policy
from openrlhf.utils.errors import RunError
from openrlhf.utils.supervise import Supervisor, describe


@dataclass(frozen=True)
class ModelSpec:
    """What a rank loads.

    Attributes:
        optimizer: None for a model that is only asked for log-probs.
        total_steps: optimizer steps of the whole run, for the schedule.
        threads: of torch on a CPU.
        timeout: seconds that a collective waits for the other ranks.
    """

    model: str
    ds: DeepSpeedConfig
    device: str
    trust_remote_code: bool
    seed: int
    optimizer: OptimizerConfig | None = None
    total_steps: int = 0
    gradient_checkpointing: bool = False
    gradient_checkpointing_reentrant: bool = False
    full_determinism: bool = False
    threads: int = 1
    timeout: float = 1800.0


class TrainWorker:
    """One rank of a model."""

    _backend: Backend

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Never returns: the call fails when this worker dies."""
        threading.Event().wait()

    def address(self) -> tuple[str, int]:
        """Returns: this node's address and a port that is free on it, for the ranks to meet at."""
        import socket

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def setup(self, spec: ModelSpec, master: tuple[str, int]) -> dict[str, Any]:
        """Joins the other ranks and loads the model. Returns: process id and node."""
        os.environ.update(
            RANK=str(self._rank),
            WORLD_SIZE=str(self._world_size),
            LOCAL_RANK="0",
            MASTER_ADDR=master[0],
            MASTER_PORT=str(master[1]),
        )
        if spec.device == "cpu":
            torch.set_num_threads(spec.threads)
        from openrlhf.backends.deepspeed_backend import DeepSpeedBackend
        from openrlhf.backends.distributed import init_distributed
        from openrlhf.trainer.process import make_deterministic, prepare_process

        prepare_process(spec.device, bars=False)
        if spec.full_determinism:
            make_deterministic()
        init_distributed(spec.device, spec.timeout)
        if spec.optimizer is None:
            self._backend = DeepSpeedBackend.for_inference(
                spec.model, ds=spec.ds, device=spec.device, trust_remote_code=spec.trust_remote_code
            )
        else:
            self._backend = DeepSpeedBackend.for_training(
                spec.model,
                ds=spec.ds,
                optimizer=spec.optimizer,
                gradient_checkpointing=spec.gradient_checkpointing,
                gradient_checkpointing_reentrant=spec.gradient_checkpointing_reentrant,
                total_steps=spec.total_steps,
                device=spec.device,
                seed=spec.seed,
                trust_remote_code=spec.trust_remote_code,
            )
        return {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()}

    def logprobs(self, micro_batches: list[PackedBatch], temperature: float) -> list[torch.Tensor]:
        """Returns: float32 [T] of each micro-batch, on the CPU."""
        with torch.no_grad():
            return [
                self._backend.forward(batch.to(self._backend.device), temperature=temperature).logprobs.float().cpu()
                for batch in micro_batches
            ]

    def update(self, share: StepShare, spec: PolicyLossSpec) -> RankResult:
        """Runs this rank's share of one optimizer step; see ``update_policy``."""
        return update_policy(self._backend, share, spec)

    def send_weights(self, engines: dict[str, Any], dtype: torch.dtype, version: int, timeout: float) -> int:
        """Hands the whole model to the engines, bucket by bucket. All ranks gather, rank 0 sends.

        Args:
            engines: handles of ``RolloutActor`` by name.
            timeout: seconds that an engine may take for one bucket.

        Returns:
            Bytes sent to each engine.
        """
        parameters = self._backend.named_full_parameters()
        if self._rank:
            for _ in parameters:
                pass
            return 0
        manifest: dict[str, int] = {}
        nbytes = 0
        with Exchange() as exchange:
            _on_all(engines, "begin_update", timeout=timeout)
            for index, tensors in enumerate(buckets(parameters, dtype)):
                size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
                bucket = write_bucket(exchange.folder(size), index, tensors)
                _on_all(engines, "load_bucket", bucket.path, bucket.checksums, timeout=timeout)
                Path(bucket.path).unlink()
                manifest.update(bucket.checksums)
                nbytes += bucket.nbytes
            _on_all(engines, "end_update", manifest, version, timeout=timeout)
        return nbytes

    def save_hf(self, folder: str) -> None:
        """Writes a folder that transformers loads."""
        self._backend.save_hf(Path(folder))

    def save_checkpoint(self, folder: str, state: dict[str, Any]) -> None:
        """Writes a state to go on from."""
        self._backend.save_checkpoint(Path(folder), state)

    def load_checkpoint(self, folder: str) -> dict[str, Any]:
        """Returns: the state that was saved beside the weights."""
        return self._backend.load_checkpoint(Path(folder))

    def close(self) -> None:
        """Leaves the process group together with the other ranks."""
        self._backend.close()


def _on_all(engines: dict[str, Any], method: str, *args: Any, timeout: float) -> None:
    """Calls ``method`` on every engine at once and waits. Raises: RunError, naming the engine that failed."""
    calls = {name: getattr(engine, method).remote(*args) for name, engine in engines.items()}
    for name, call in calls.items():
        try:
            ray.get(call, timeout=timeout)
        except RayError as error:
            raise RunError(f"{name} did not take the weights: {describe(error)}") from error


class WorkerGroup:
    """All ranks of one model."""

    def __init__(self, role: str, places: Sequence[Place], supervisor: Supervisor) -> None:
        actor = ray.remote(concurrency_groups={"watch": 1})(TrainWorker)
        size = len(places)
        self.role = role
        self.supervisor = supervisor
        self.workers = [actor.options(**place.options()).remote(rank, size) for rank, place in enumerate(places)]
        self.names = [f"{role} worker {rank}" for rank in range(size)]
        for name, worker in zip(self.names, self.workers, strict=True):
            supervisor.watch(name, worker.watch.remote())

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.workers)

    def call(self, method: str, *args: Any, timeout: float, per_rank: Sequence[Any] | None = None) -> list[Any]:
        """Calls ``method`` on every rank and waits.

        Args:
            per_rank: first argument of each rank; ``args`` follow it.

        Returns:
            The results by rank.

        Raises:
            RunError: a rank died or failed, or the time is up.
        """
        refs = {}
        for rank, (name, worker) in enumerate(zip(self.names, self.workers, strict=True)):
            own = () if per_rank is None else (per_rank[rank],)
            refs[name] = getattr(worker, method).remote(*own, *args)
        results = self.supervisor.get_all(refs, what=f"the end of {method}", timeout=timeout)
        return [results[name] for name in self.names]

    def setup(self, spec: ModelSpec, timeout: float) -> list[dict[str, Any]]:
        """Loads the model on all ranks."""
        master = self.supervisor.get(
            self.workers[0].address.remote(), name=self.names[0], what="an address to meet at", timeout=timeout
        )
        return self.call("setup", spec, master, timeout=timeout)

    def logprobs(
        self,
        batch: PackedBatch,
        dealt: tuple[list[list[PackedBatch]], list[list[list[int]]]],
        temperature: float,
        timeout: float,
    ) -> torch.Tensor:
        """Log-probs of every token of ``batch``, computed in the shares that ``deal`` made of all its rows.

        Returns:
            float32 [T].
        """
        batches, rows = dealt
        result = torch.zeros(batch.tokens.numel(), dtype=torch.float32)
        starts = batch.cu_seqlens.tolist()
        shares = self.call("logprobs", temperature, timeout=timeout, per_rank=batches)
        for share, held in zip(shares, rows, strict=True):
            for values, members in zip(share, held, strict=True):
                offset = 0
                for row in members:
                    length = starts[row + 1] - starts[row]
                    result[starts[row] : starts[row + 1]] = values[offset : offset + length]
                    offset += length
        return result
