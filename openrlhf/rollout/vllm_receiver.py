"""The end of a weight transfer inside vLLM's worker process; beside `vllm_engine`, all that imports vLLM."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from openrlhf.rollout.integrity import Receipt, TransferError
from openrlhf.rollout.transports import Inbox, Rendezvous, gpu_uuid

BACKEND = "openrlhf"
OWNER_VARIABLE = "OPENRLHF_ENGINE_OWNER"
_WATCH = "end-with-owner"
WORKER_EXTENSION = "openrlhf.rollout.vllm_receiver.WorkerExtension"
# Seconds that a process of an engine on a CPU looks for the next message before it waits to be woken.
_LOOKING_S = 0.001


def _rest_between_messages() -> None:
    """Has the readers of messages that this process is about to make give their core away when none comes.

    By default they look for a second without pause: while the model computes, and into the training that follows. On a
    CPU that is a core of those that compute, and OpenMP's threads all wait for the one that has lost its own.
    """
    SpinCondition.__init__ = partialmethod(SpinCondition.__init__, busy_loop_s=_LOOKING_S)


class CpuExecutor(MultiprocExecutor):
    """vLLM's executor for a model that computes on the cores that the processes around it run on."""

    def _init_executor(self) -> None:
        _rest_between_messages()
        super()._init_executor()


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Where to meet a sender that broadcasts; nothing for the other transports.

    Attributes:
        rendezvous: the fields of a ``Rendezvous``, or empty.
        first_rank: of this engine's workers.
    """

    rendezvous: dict[str, Any] = field(default_factory=dict)
    first_rank: int = 0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket, or the manifest that closes an update.

    Attributes:
        payload: what ``Inbox.take`` understands; empty for the manifest.
        checksums: of the bucket's tensors, or of the whole model.
    """

    payload: dict[str, Any]
    checksums: dict[str, int]


class BucketWeightEngine(WeightTransferEngine):
    """Loads buckets into a started engine, and refuses an update that is not whole."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A worker that was forked has not imported this module itself, and threads do not come along.
        _watch_owner()
        if self.device.type == "cpu":
            _rest_between_messages()
        self._inbox = Inbox(self.device)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Meets the sender where it broadcasts."""
        if init_info.rendezvous:
            self._inbox.join(Rendezvous(**init_info.rendezvous), init_info.first_rank + self.parallel_config.rank)

    def start_weight_update(self) -> None:
        """Opens an update: every layer waits for all of its weights."""
        self._receipt = Receipt()
        self._complete = False
        self._forget_expert_kernels()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Takes a bucket, or checks the manifest."""
        try:
            if update_info.payload:
                self._load(update_info)
            else:
                self._receipt.complete(update_info.checksums)
                self._check_every_layer()
                self._complete = True
        except Exception as error:
            # Layers are left waiting on the meta device otherwise, and the next update would fail on them.
            self._install()
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"weights could not be loaded: {type(error).__name__}: {error}") from error

    def finish_weight_update(self) -> None:
        """Puts the received weights to use."""
        if not self._complete:
            raise TransferError("a weight update was finished before its manifest was checked")
        self._install()

    def _load(self, update_info: UpdateInfo) -> None:
        tensors, sums = self._inbox.take(update_info.payload)
        self._receipt.accept(sums, update_info.checksums)
        self.model.load_weights(iter(tensors.items()))

    def _install(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self._tie_head()

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        """vLLM 0.25 asks for a sender beside the receiver; ours stands in the trainer's process, without vLLM.

        Raises: NotImplementedError.
        """
        raise NotImplementedError("weights are sent by the training workers, bucket by bucket")

    def _check_every_layer(self) -> None:
        """Names the engine's own parameters that nothing was loaded into.

        The trainer's manifest cannot tell this: it knows the trainer's names alone.
        """
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            if not info.can_load() or not info.load_numel_total or self._is_tied_head(layer):
                continue
            parameters = dict(layer.named_parameters(recurse=False))
            expected = sum(p.numel() for p in parameters.values()) - _padding(layer, parameters)
            if parameters and info.load_numel < expected:
                raise TransferError(
                    f"engine layer {name} received {info.load_numel} of {expected} elements of {sorted(parameters)}"
                )

    def _forget_expert_kernels(self) -> None:
        # Experts are repacked for the CPU only when their kernel is made: beside an old kernel, vLLM would use new
        # weights as if they were repacked.
        if self.device.type != "cpu":
            return
        for layer in self.model.modules():
            method = getattr(layer, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None

    def _tied_head(self) -> torch.nn.Module | None:
        config = self.model_config.hf_text_config
        if not getattr(config, "tie_word_embeddings", False):
            return None
        return getattr(self.model, "lm_head", None)

    def _is_tied_head(self, layer: torch.nn.Module) -> bool:
        return layer is self._tied_head()

    def _tie_head(self) -> None:
        # On the CPU a head keeps a repacked copy of the embedding, which reloading the embedding leaves stale.
        head = self._tied_head()
        if head is None or self.device.type != "cpu":
            return
        embedding = self.model.model.embed_tokens
        if head is embedding:
            return
        head.weight = embedding.weight
        head.quant_method.process_weights_after_loading(head)


def _padding(layer: torch.nn.Module, parameters: dict[str, torch.Tensor]) -> int:
    """Elements of a vocabulary layer that stand for no token of the model, so that no checkpoint fills them."""
    if not hasattr(layer, "num_embeddings_padded") or "weight" not in parameters:
        return 0
    rows, width = parameters["weight"].shape[0], parameters["weight"].shape[1:].numel()
    return (rows - min(rows, layer.org_vocab_size)) * width


WeightTransferEngineFactory.register_engine(BACKEND, BucketWeightEngine)


def _watch_owner() -> None:
    """Ends this process, and vLLM's core that started it, soon after the engine's owner is gone, however it went.

    vLLM's core outlives a killed owner: nothing in it watches. Once a process; in one that owns an engine, nothing.
    """
    owner = int(os.environ.get(OWNER_VARIABLE, os.getpid()))
    if owner == os.getpid() or any(thread.name == _WATCH for thread in threading.enumerate()):
        return
    core = os.getppid()

    def watch() -> None:
        while os.getppid() == core and Path(f"/proc/{owner}").exists():
            time.sleep(1.0)
        if os.getppid() == core:
            os.kill(core, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name=_WATCH, daemon=True).start()


# Workers import this as their extension before they meet each other, which may never come about.
_watch_owner()


class WorkerExtension:
    """Named to vLLM as worker extension, so that its workers import this module, and with it the transfer engine."""

    device: torch.device

    def openrlhf_gpu(self) -> str | None:
        """Returns: the name of this worker's card that is the same in every process; None on a CPU."""
        return gpu_uuid(self.device) if self.device.type == "cuda" else None
