"""vLLM behind the `Engine` protocol of the agents. Every import of vLLM stands in this module.

The weight-transfer engine below lives in vLLM's worker process, `VllmEngine` in the process that drives it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm import AsyncEngineArgs, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from openrlhf.rollout.engine_files import EngineFiles, describe_start
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.transfer import Receipt, TransferError
from openrlhf.utils.errors import RunError

SHM_BACKEND = "openrlhf_shm"
_WORKER_EXTENSION = "openrlhf.rollout.vllm_engine.WorkerExtension"
_CPU_BATCHED_TOKENS = 8192
_OWNER_VARIABLE = "OPENRLHF_ENGINE_OWNER"


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Nothing is agreed on beforehand: each bucket names its file."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """One bucket, or the manifest that closes an update.

    Attributes:
        path: safetensors file of the bucket; empty for the manifest.
        checksums: of the bucket's tensors, or of the whole model.
    """

    path: str
    checksums: dict[str, int]


class ShmWeightEngine(WeightTransferEngine):
    """Loads buckets from shared memory into a started engine, and refuses an update that is not whole."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM makes this object in each of its workers, before it serves anything.
        _end_with(int(os.environ[_OWNER_VARIABLE]))

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Opens an update: every layer waits for all of its weights."""
        self._receipt = Receipt()
        self._complete = False
        self._forget_expert_kernels()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Takes a bucket, or checks the manifest."""
        try:
            if update_info.path:
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

    def _load(self, update_info: ShmUpdateInfo) -> None:
        from safetensors.torch import load_file

        tensors = load_file(update_info.path)
        self._receipt.accept(tensors, update_info.checksums)
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


WeightTransferEngineFactory.register_engine(SHM_BACKEND, ShmWeightEngine)


def _end_with(owner: int) -> None:
    """Ends this process, and vLLM's core that started it, soon after the process ``owner`` is gone, however it went.

    vLLM's core outlives a killed owner: nothing in it watches.
    """
    core = os.getppid()

    def watch() -> None:
        while os.getppid() == core and Path(f"/proc/{owner}").exists():
            time.sleep(1.0)
        if os.getppid() == core:
            os.kill(core, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-owner", daemon=True).start()


class WorkerExtension:
    """Named to vLLM as worker extension, so that its workers import this module, and with it the transfer engine."""


class EngineDied(RuntimeError):
    """A process of the engine has ended."""


class VllmEngine:
    """One vLLM engine with token ids in and token ids out."""

    def __init__(self, spec: EngineSpec, files: EngineFiles | None = None) -> None:
        """Starts the engine's processes.

        Args:
            files: where they write what goes wrong, entered (``starting``) before this module was imported.

        Raises: RunError, naming the model and what vLLM says of it.
        """
        self._files = files
        on_cpu = spec.kv_cache_bytes is not None
        arguments: dict[str, Any] = {
            "model": spec.model,
            "dtype": spec.dtype,
            "max_model_len": spec.max_model_len,
            "max_num_seqs": spec.max_num_seqs,
            "seed": spec.seed,
            "tensor_parallel_size": spec.tensor_parallel_size,
            "enforce_eager": spec.enforce_eager or on_cpu,
            "enable_prefix_caching": spec.enable_prefix_caching,
            "trust_remote_code": spec.trust_remote_code,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": _WORKER_EXTENSION,
            "weight_transfer_config": WeightTransferConfig(backend=SHM_BACKEND),
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if on_cpu:
            arguments["kv_cache_memory_bytes"] = spec.kv_cache_bytes
            # A prompt that is prefilled in parts rewinds its generator, which torch's CPU generators cannot do.
            arguments["enable_chunked_prefill"] = False
            arguments["max_num_batched_tokens"] = max(_CPU_BATCHED_TOKENS, spec.max_model_len)
            arguments["distributed_executor_backend"] = "uni" if spec.tensor_parallel_size == 1 else "mp"
        else:
            arguments["gpu_memory_utilization"] = spec.gpu_memory_utilization
        os.environ[_OWNER_VARIABLE] = str(os.getpid())
        try:
            self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**{**arguments, **spec.extra}))
        except Exception as error:
            cause = self._written_cause() or describe_start(error)
            raise RunError(f"vLLM could not start with the model {spec.model}: {cause}") from error
        self._request_ids = itertools.count()
        self._running = 0
        self._updating = False
        self._whole = True
        self.weight_version = 0
        self.vocab_size: int = self._engine.model_config.get_vocab_size()

    def _written_cause(self) -> str | None:
        return None if self._files is None else self._files.cause()

    @contextlib.contextmanager
    def _naming_death(self) -> Iterator[None]:
        try:
            yield
        except EngineDeadError as error:
            cause = self._written_cause() or "killed, crashed or out of memory"
            raise EngineDied(f"a process of the engine has ended: {cause}") from error

    @contextlib.contextmanager
    def _naming_fault(self) -> Iterator[None]:
        # vLLM hands on an error of its workers as text alone.
        try:
            with self._naming_death():
                yield
        except (EngineDied, TransferError):
            raise
        except Exception as error:
            wrapped = re.search(r"Worker failed with error '(.*)', please check the stack trace", str(error), re.DOTALL)
            raise TransferError(wrapped[1] if wrapped else str(error)) from error

    async def start(self) -> None:
        """Connects the weight transfer."""
        with self._naming_death():
            await self._engine.init_weight_transfer_engine(WeightTransferInitRequest({}))

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: SamplingParams, multi_modal_data: Any = None
    ) -> Any:
        """Samples once. Returns: vLLM's final RequestOutput.

        Raises:
            TransferError: the last weight update failed, so the engine holds a mixture.
            Whatever vLLM raises; a cancelled call aborts its request.
        """
        if not self._whole:
            raise TransferError("the engine's last weight update did not succeed: it must not be sampled from")
        prompt: dict[str, Any] = {"prompt_token_ids": list(prompt_token_ids)}
        if multi_modal_data is not None:
            prompt["multi_modal_data"] = multi_modal_data
        final = None
        self._running += 1
        try:
            with self._naming_death():
                async for output in self._engine.generate(prompt, sampling_params, f"r{next(self._request_ids)}"):
                    final = output
        finally:
            self._running -= 1
        return final

    async def begin_update(self) -> None:
        """Opens a weight update; none is served until it has ended well.

        Raises:
            TransferError: requests are running, which would go on with other weights than they began with.
        """
        if self._running:
            raise TransferError(f"a weight update was begun while {self._running} requests were running")
        self._whole = False
        if self._updating:
            # The sender gave up in the middle of the last one. No model has an empty manifest, so this closes it.
            with contextlib.suppress(TransferError):
                await self._hand_over("", {})
        with self._naming_fault():
            await self._engine.start_weight_update()
        self._updating = True

    async def load_bucket(self, path: str, checksums: dict[str, int]) -> None:
        """Loads one bucket that lies at ``path``.

        Raises:
            TransferError: it is not what ``checksums`` announce; the update has failed.
        """
        await self._hand_over(path, checksums)

    async def end_update(self, manifest: dict[str, int], version: int) -> None:
        """Checks that the update was whole, puts it to use and forgets what older weights have cached.

        Raises:
            TransferError: it was not whole; the update has failed.
        """
        await self._hand_over("", manifest)
        with self._naming_fault():
            await self._engine.finish_weight_update()
            self._updating = False
            if await self._engine.reset_prefix_cache() is False:
                raise TransferError("the engine kept its prefix cache, which belongs to older weights")
        self.weight_version = version
        self._whole = True

    async def _hand_over(self, path: str, checksums: dict[str, int]) -> None:
        try:
            with self._naming_fault():
                await self._engine.update_weights(WeightTransferUpdateRequest({"path": path, "checksums": checksums}))
        except TransferError:
            self._updating = False
            raise

    async def check_health(self) -> None:
        """Raises where the engine's core has died."""
        with self._naming_death():
            await self._engine.check_health()

    def shutdown(self) -> None:
        """Ends the engine's processes."""
        self._engine.shutdown()


def make_sampling_params(
    *, max_tokens: int | None, temperature: float, top_p: float, seed: int | None, logprobs: bool
) -> SamplingParams:
    """Sampling settings of one sample.

    Args:
        max_tokens: new tokens at most; None means all that the context leaves.
        seed: makes the sample repeatable; None lets the engine draw.
        logprobs: asks for the log-prob of each sampled token.
    """
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        logprobs=0 if logprobs else None,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
