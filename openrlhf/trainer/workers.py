"""The ranks of one model as Ray actors, and the group that the controller talks to."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from torch.distributed import TCPStore

from openrlhf.backends.base import Backend
from openrlhf.backends.shapes import parameter_shapes, refuse_other_model, write_shapes
from openrlhf.config import DeepSpeedConfig, OptimizerConfig
from openrlhf.data.packed_batch import PackedBatch
from openrlhf.models.value_head import HeadSpec
from openrlhf.rollout.sending import send_weights
from openrlhf.rollout.transports import (
    BroadcastSender,
    IpcSender,
    Rendezvous,
    Sender,
    SharedMemorySender,
    WeightGroup,
    gpu_uuid,
)
from openrlhf.trainer.device_meter import DeviceMeter, Usage
from openrlhf.trainer.placement import Place
from openrlhf.trainer.policy_update import PolicyLossSpec, RankResult, StepShare, update_policy
from openrlhf.trainer.profiling import StepTrace, trace_name
from openrlhf.trainer.value_update import ValueLossSpec, update_critic
from openrlhf.utils.own_gpus import keep_own_gpus
from openrlhf.utils.supervise import Supervisor


@dataclass(frozen=True)
class ModelSpec:
    """What a rank loads.

    Attributes:
        optimizer: None for a model that is only asked for log-probs.
        total_steps: optimizer steps of the whole run, for the schedule.
        threads: of torch on a CPU.
        timeout: seconds that a collective waits for the other ranks.
        head: of a critic or a reward model; None for a language model.
        offload: the weights of a model that only answers stay in host memory between its forwards.
        ema_beta: decay of a moving average of the weights; None keeps none.
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
    head: HeadSpec | None = None
    offload: bool = False
    ema_beta: float | None = None


class TrainWorker:
    """One rank of a model."""

    _backend: Backend
    _meter: DeviceMeter
    _trace: StepTrace | None = None

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._meeting_places: list[TCPStore] = []

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Never returns: the call fails when this worker dies."""
        threading.Event().wait()

    def address(self) -> tuple[str, int]:
        """Opens a store where processes can meet, on a port that the system chose. Returns: its address and port."""
        host = ray.util.get_node_ip_address()
        # Held from here on: a port that was only looked for could be another process's when the others come.
        self._meeting_places.append(TCPStore(host, 0, is_master=True, wait_for_workers=False))
        return host, self._meeting_places[-1].port

    def setup(self, spec: ModelSpec, master: tuple[str, int]) -> dict[str, Any]:
        """Joins the other ranks and loads the model. Returns: process id, node and GPU."""
        keep_own_gpus()
        os.environ.update(
            RANK=str(self._rank),
            WORLD_SIZE=str(self._world_size),
            LOCAL_RANK="0",
            MASTER_ADDR=master[0],
            MASTER_PORT=str(master[1]),
            # torch's word for a store that stands already: no rank opens one.
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT="0",
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
        self._offload, self._ema_beta = spec.offload, spec.ema_beta
        if spec.optimizer is None:
            self._backend = DeepSpeedBackend.for_inference(
                spec.model, ds=spec.ds, device=spec.device, trust_remote_code=spec.trust_remote_code, head=spec.head
            )
            if spec.offload:
                self._backend.offload()
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
                head=spec.head,
                ema=spec.ema_beta is not None,
            )
        self._meter = DeviceMeter(self._backend)
        gpu = gpu_uuid() if spec.device == "cuda" else None
        return {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id(), "gpu": gpu}

    def logprobs(
        self, micro_batches: list[PackedBatch], temperature: float, adapters: bool = True
    ) -> list[torch.Tensor]:
        """Returns: float32 [T] of each micro-batch, on the CPU; see ``Backend.forward``."""

        def ask(batch: PackedBatch) -> torch.Tensor:
            return self._backend.forward(batch, temperature=temperature, adapters=adapters).logprobs

        return self._answers(micro_batches, ask)

    def values(self, micro_batches: list[PackedBatch]) -> list[torch.Tensor]:
        """Returns: float32 [T] of each micro-batch, the value of the state before each token."""
        return self._answers(micro_batches, self._backend.values)

    def row_scores(self, micro_batches: list[PackedBatch]) -> list[torch.Tensor]:
        """Returns: float32 [N] of each micro-batch, a score for each of its rows."""
        return self._answers(micro_batches, self._backend.row_scores)

    def statistics(self) -> tuple[float, float]:
        """Returns: mean and standard deviation of a reward model's scores, as its config stores them."""
        return self._backend.config.mean, self._backend.config.std

    def _answers(
        self, micro_batches: list[PackedBatch], ask: Callable[[PackedBatch], torch.Tensor]
    ) -> list[torch.Tensor]:
        if self._offload:
            self._backend.reload()
        with torch.no_grad():
            asked = [ask(batch.to(self._backend.device)).float() for batch in micro_batches]
            # Read at the end: the device has the next forward before it is done with this one.
            answers = [answer.cpu() for answer in asked]
        if self._offload:
            self._backend.offload()
        return answers

    def update(self, share: StepShare, spec: PolicyLossSpec) -> RankResult:
        """Runs this rank's share of one optimizer step; see ``update_policy``."""
        with self._meter.training():
            result = update_policy(self._backend, share, spec)
        if self._ema_beta is not None and not result.step.skipped:
            self._backend.ema_update(self._ema_beta)
        return result

    def update_critic(self, share: StepShare, spec: ValueLossSpec) -> RankResult:
        """Runs this rank's share of one optimizer step; see ``update_critic``."""
        with self._meter.training():
            return update_critic(self._backend, share, spec)

    def open_sender(self, transport: str, place: Rendezvous | None, readers: Mapping[str, Sequence[str]]) -> None:
        """Prepares the way of the weights to the engines.

        Args:
            transport: "shm", "ipc", "nccl" or "gloo".
            place: where the first rank meets the engines' workers, for the last two.
            readers: names of the engines that have a worker on a card, by the card's name.
        """
        self._transport = transport
        self._readers = readers
        self._group = None
        if place is not None and self._rank == 0:
            self._group = WeightGroup(place, 0, self._backend.device)

    def _sender(self) -> Sender:
        if self._transport == "ipc":
            return IpcSender(self._readers)
        return SharedMemorySender() if self._group is None else BroadcastSender(self._group)

    def send_weights(self, engines: dict[str, Any], dtype: torch.dtype, version: int, timeout: float) -> int:
        """Hands the whole model to the engines; see ``sending.send_weights``. All ranks gather."""
        parameters = self._backend.named_full_parameters()
        leads = self._rank == 0
        return send_weights(parameters, self._sender(), engines, dtype, version, leads=leads, timeout=timeout)

    def offload(self) -> None:
        """Moves weights and optimizer off the accelerator until ``reload``."""
        self._backend.offload()

    def reload(self) -> None:
        """Undoes ``offload``."""
        self._backend.reload()

    def release(self, share: float) -> None:
        """Gives unused memory of the accelerator back to others, unless ``share`` of all of it is free.

        Giving it back and taking it again costs tenths of a second for tens of GiB.
        """
        if self._backend.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._backend.device)
            if free < share * total:
                torch.cuda.empty_cache()

    def save_hf(self, folder: str, ema: bool = False) -> None:
        """Writes a folder that transformers loads; with ``ema`` of the moving average."""
        self._backend.save_hf(Path(folder), ema=ema)

    def save_checkpoint(self, folder: str, state: dict[str, Any]) -> None:
        """Writes a state to go on from, with the shapes of the model that it is of."""
        self._backend.save_checkpoint(Path(folder), state)
        if self._rank == 0:
            write_shapes(Path(folder), parameter_shapes(self._backend.module))

    def load_checkpoint(self, folder: str) -> dict[str, Any]:
        """Returns: the state that was saved beside the weights.

        Raises: ConfigError, where another model has written it; see ``Backend.load_checkpoint`` for the rest.
        """
        refuse_other_model(Path(folder), parameter_shapes(self._backend.module))
        return self._backend.load_checkpoint(Path(folder))

    def close(self) -> None:
        """Leaves the process group together with the other ranks."""
        self._backend.close()

    def usage(self) -> Usage:
        """Returns: memory and time of this rank's device since the last call."""
        return self._meter.take()

    def start_trace(self) -> None:
        """Records what this rank does until ``finish_trace``."""
        self._trace = StepTrace()

    def finish_trace(self, folder: str, role: str, steps: tuple[int, int]) -> str | None:
        """Writes the record of ``steps``. Returns: a sentence where that failed."""
        trace, self._trace = self._trace, None
        return None if trace is None else trace.finish(Path(folder), trace_name(role, self._rank, steps))


Dealt = tuple[list[list[PackedBatch]], list[list[list[int]]]]
"""Micro-batches of each rank, and the rows of the whole batch that stand in each; see ``experience.deal``."""


class WorkerGroup:
    """All ranks of one model."""

    def __init__(self, role: str, places: Sequence[Place], supervisor: Supervisor) -> None:
        actor = ray.remote(concurrency_groups={"watch": 1})(TrainWorker)
        size = len(places)
        self.role = role
        self.device: str | None = None
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

    def call_first(self, method: str, *args: Any, timeout: float) -> Any:
        """Calls ``method`` on the first rank alone and waits; otherwise as ``call``."""
        ref = getattr(self.workers[0], method).remote(*args)
        return self.supervisor.get(ref, name=self.names[0], what=f"the end of {method}", timeout=timeout)

    def setup(self, spec: ModelSpec, timeout: float) -> list[dict[str, Any]]:
        """Loads the model on all ranks."""
        self.device = spec.device
        master = self.call_first("address", timeout=timeout)
        return self.call("setup", spec, master, timeout=timeout)

    def logprobs(
        self, batch: PackedBatch, dealt: Dealt, temperature: float, timeout: float, *, adapters: bool = True
    ) -> torch.Tensor:
        """Returns: float32 [T], log-probs of every token of ``batch``, computed in the shares ``dealt`` of all rows.

        Args: ``adapters``: False asks the model below the group's adapters.
        """
        return self._per_token("logprobs", batch, dealt, timeout, temperature, adapters)

    def values(self, batch: PackedBatch, dealt: Dealt, timeout: float) -> torch.Tensor:
        """Returns: float32 [T], the value of the state before every token of ``batch``."""
        return self._per_token("values", batch, dealt, timeout)

    def row_scores(self, batch: PackedBatch, dealt: Dealt, timeout: float) -> torch.Tensor:
        """Returns: float32 [N], a score for every row of ``batch``."""
        scores = torch.zeros(batch.num_rows, dtype=torch.float32)
        for values, rows in self._ask("row_scores", dealt, timeout):
            scores[rows] = values[: len(rows)]
        return scores

    def _per_token(self, method: str, batch: PackedBatch, dealt: Dealt, timeout: float, *args: Any) -> torch.Tensor:
        result = torch.zeros(batch.tokens.numel(), dtype=torch.float32)
        starts = batch.cu_seqlens.tolist()
        for values, rows in self._ask(method, dealt, timeout, *args):
            offset = 0
            for row in rows:
                length = starts[row + 1] - starts[row]
                result[starts[row] : starts[row + 1]] = values[offset : offset + length]
                offset += length
        return result

    def _ask(self, method: str, dealt: Dealt, timeout: float, *args: Any) -> Iterator[tuple[torch.Tensor, list[int]]]:
        """Yields what a rank says of each micro-batch, with the rows that stand in it."""
        batches, rows = dealt
        shares = self.call(method, *args, timeout=timeout, per_rank=batches)
        for share, held in zip(shares, rows, strict=True):
            yield from zip(share, held, strict=True)
