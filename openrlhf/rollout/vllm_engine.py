"""vLLM behind the `Engine` protocol of the agents, in the process that drives it.

Every import of vLLM stands here and in `vllm_receiver`, which lives in vLLM's worker processes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import psutil
from vllm import AsyncEngineArgs, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from openrlhf.rollout.engine_files import EngineFiles, describe_start
from openrlhf.rollout.engine_spec import EngineSpec, batched_tokens
from openrlhf.rollout.integrity import TransferError
from openrlhf.rollout.transports import Rendezvous
from openrlhf.rollout.vllm_receiver import BACKEND, OWNER_VARIABLE, WORKER_EXTENSION, CpuExecutor
from openrlhf.utils.errors import RunError


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
            "worker_extension_cls": WORKER_EXTENSION,
            "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "max_num_batched_tokens": batched_tokens(spec),
        }
        if on_cpu:
            arguments["kv_cache_memory_bytes"] = spec.kv_cache_bytes
            # A prompt that is prefilled in parts rewinds its generator, which torch's CPU generators cannot do.
            arguments["enable_chunked_prefill"] = False
            arguments["distributed_executor_backend"] = CpuExecutor
        else:
            # Left to itself vLLM sees Ray and asks it for whole GPUs, which the engine's place has been given already.
            arguments["distributed_executor_backend"] = "mp" if spec.tensor_parallel_size > 1 else "uni"
            arguments["gpu_memory_utilization"] = spec.gpu_memory_utilization
            arguments["enable_sleep_mode"] = spec.enable_sleep
        os.environ[OWNER_VARIABLE] = str(os.getpid())
        try:
            self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**{**arguments, **spec.extra}))
        except Exception as error:
            cause = self._written_cause() or describe_start(error)
            raise RunError(f"vLLM could not start with the model {spec.model}: {cause}") from error
        finally:
            # For the engine's processes alone: they have it from their start.
            os.environ.pop(OWNER_VARIABLE, None)
        self._processes = [child for child in psutil.Process().children(recursive=True) if _is_vllms(child)]
        self._request_ids = itertools.count()
        self._running = 0
        self._updating = False
        self._whole = True
        self._awake = True
        # Something may be cached that older weights computed.
        self._caching = False
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

    async def start(self) -> list[str | None]:
        """Makes the workers ready for weights. Returns: by worker, the name of its GPU; None on a CPU."""
        with self._naming_death():
            await self._engine.init_weight_transfer_engine(WeightTransferInitRequest({}))
            return await self._engine.collective_rpc("openrlhf_gpu")

    async def join(self, place: Rendezvous, first_rank: int) -> None:
        """Has the workers meet a sender that broadcasts; it waits for all of them.

        Args:
            first_rank: of this engine's workers.
        """
        info = {"rendezvous": asdict(place), "first_rank": first_rank}
        with self._naming_fault():
            await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(info))

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: SamplingParams, multi_modal_data: Any = None
    ) -> Any:
        """Samples once. Returns: vLLM's final RequestOutput.

        Raises:
            TransferError: the last weight update failed, so the engine holds a mixture.
            Whatever vLLM raises; a cancelled call aborts its request.
        """
        if not self._awake:
            raise TransferError("the engine sleeps: it must be woken before it is sampled from")
        if not self._whole:
            raise TransferError("the engine's last weight update did not succeed: it must not be sampled from")
        prompt: dict[str, Any] = {"prompt_token_ids": list(prompt_token_ids)}
        if multi_modal_data is not None:
            prompt["multi_modal_data"] = multi_modal_data
        final = None
        self._caching = True
        self._running += 1
        try:
            with self._naming_death():
                async for output in self._engine.generate(prompt, sampling_params, f"r{next(self._request_ids)}"):
                    final = output
        finally:
            self._running -= 1
        return final

    async def sleep(self) -> None:
        """Frees the GPU memory of cache and weights; the weights have to be sent again.

        Raises: TransferError where requests are running, which would be lost.
        """
        if self._running:
            raise TransferError(f"the engine was sent to sleep while {self._running} requests were running")
        self._awake = self._whole = False
        with self._naming_death():
            # Level 1 would keep a copy of weights that are about to be replaced.
            await self._engine.sleep(level=2)
        # vLLM forgets what it has cached before it gives the memory of it away.
        self._caching = False

    async def wake(self, part: str) -> None:
        """Takes GPU memory back.

        Args:
            part: "weights", which are then to be sent, or "kv_cache", after which the engine can be sampled from.
        """
        with self._naming_death():
            await self._engine.wake_up(tags=[part])
        self._awake = self._awake or part == "kv_cache"

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
                await self._hand_over({}, {})
        with self._naming_fault():
            await self._engine.start_weight_update()
        self._updating = True

    async def load_bucket(self, payload: dict[str, Any], checksums: dict[str, int]) -> None:
        """Loads one bucket.

        Args:
            payload: what an ``Offer`` says of it.

        Raises:
            TransferError: it is not what ``checksums`` announce; the update has failed.
        """
        await self._hand_over(payload, checksums)

    async def end_update(self, manifest: dict[str, int], version: int) -> None:
        """Checks that the update was whole, puts it to use and forgets what older weights have cached.

        Raises:
            TransferError: it was not whole; the update has failed.
        """
        await self._hand_over({}, manifest)
        with self._naming_fault():
            await self._engine.finish_weight_update()
            self._updating = False
            # It looks at every block, for a twentieth of a second where a cache has 60 GiB.
            if self._caching and await self._engine.reset_prefix_cache() is False:
                raise TransferError("the engine kept its prefix cache, which belongs to older weights")
            self._caching = False
        self.weight_version = version
        self._whole = True

    async def _hand_over(self, payload: dict[str, Any], checksums: dict[str, int]) -> None:
        request = WeightTransferUpdateRequest({"payload": payload, "checksums": checksums})
        try:
            with self._naming_fault():
                await self._engine.update_weights(request)
        except TransferError:
            self._updating = False
            raise

    def check_processes(self) -> None:
        """Raises EngineDied where one of the engine's processes has ended."""
        for process in self._processes:
            if not _lives(process):
                cause = self._written_cause() or "killed, crashed or out of memory"
                raise EngineDied(f"a process of the engine has ended: {cause}")

    async def check_health(self) -> None:
        """Raises where the engine's core has died."""
        with self._naming_death():
            await self._engine.check_health()

    def shutdown(self) -> None:
        """Ends the engine's processes."""
        self._engine.shutdown()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_vllms(process: psutil.Process) -> bool:
    """Whether a process has a title as vLLM gives its own."""
    try:
        return " ".join(process.cmdline()).startswith("VLLM::")
    except psutil.Error:
        return False


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
