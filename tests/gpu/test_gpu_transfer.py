"""Weights into an engine on the same card: exact, refused where a byte is off, its memory free while it sleeps."""

from __future__ import annotations

import asyncio
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.gpu_process import needs_engine, on_gpu
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600, func_only=True)]

PROMPT = [5, 6, 7, 8]
GIB = 2**30
# Mean difference of log-probs by the rounding of bf16 alone.
CLOSE, FAR = 0.03, 0.1


def _used() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


class _Room:
    """An engine that can sleep, and the plain model whose weights it is given from the same card."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        from openrlhf.backends.distributed import init_distributed
        from openrlhf.rollout.engine_spec import EngineSpec
        from openrlhf.rollout.vllm_engine import VllmEngine

        init_distributed("cuda")
        self.loop = asyncio.Runner()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()
        self.used_before = _used()
        spec = EngineSpec(
            model=str(folder), dtype="bfloat16", max_model_len=256, seed=0, max_num_seqs=16, enforce_eager=True,
            gpu_memory_utilization=0.3, enable_sleep=True,
        )  # fmt: skip
        self.engine = self.loop.run(self._start(spec, VllmEngine))

    async def _start(self, spec: Any, engine: Any) -> Any:
        started = engine(spec)
        await started.start()
        return started

    def change(self) -> None:
        """Makes another model of the same weights in another order: larger ones would be rounded more coarsely."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.view(-1)[torch.randperm(parameter.numel())].view_as(parameter))

    def send(self, spoil: str | None = None) -> None:
        """Sends all weights; a byte of the tensor ``spoil`` changes after its checksum was taken."""
        from openrlhf.backends.weights import full_parameters
        from openrlhf.rollout.packing import Layout, unpack
        from openrlhf.rollout.transfer import buckets
        from openrlhf.rollout.transports import IpcSender, gpu_uuid

        async def steps() -> None:
            sender, manifest = IpcSender({gpu_uuid(): ["engine"]}), {}
            await self.engine.begin_update()
            for tensors in buckets(full_parameters(self.model, sharded=False), torch.bfloat16, 200_000):
                offer = sender.put(tensors)
                if spoil in tensors:
                    held = unpack(Layout(**offer.payload["layout"]), sender._buffer)[spoil]
                    held.view(-1)[-1] += 1
                    torch.cuda.synchronize()
                await self.engine.load_bucket(offer.payload_for("engine"), offer.checksums)
                sender.release()
                manifest |= offer.checksums
            await self.engine.end_update(manifest, 1)

        self.loop.run(steps())

    def gap(self) -> float:
        """Returns: mean difference of the log-probs of engine and model."""
        from openrlhf.rollout.vllm_engine import make_sampling_params

        params = make_sampling_params(max_tokens=32, temperature=1.0, top_p=1.0, seed=None, logprobs=True)
        params.ignore_eos = True
        output = self.loop.run(self.engine.generate(PROMPT, params)).outputs[0]
        ids = list(output.token_ids)
        found = torch.tensor([entry[token].logprob for entry, token in zip(output.logprobs, ids, strict=True)])
        with torch.no_grad():
            logits = self.model(torch.tensor([PROMPT + ids], device="cuda")).logits[0, len(PROMPT) - 1 : -1]
        expected = logits.float().log_softmax(-1).gather(1, torch.tensor(ids, device="cuda")[:, None])[:, 0]
        return float((expected.cpu() - found).abs().mean())

    def wake_with_weights(self) -> None:
        self.loop.run(self.engine.wake("weights"))
        self.send()
        self.loop.run(self.engine.wake("kv_cache"))


def _sleep_and_transfer(folder: Path) -> dict[str, Any]:
    from openrlhf.rollout.integrity import TransferError

    room = _Room(folder)
    seen: dict[str, Any] = {"start": room.gap()}
    seen["awake"] = _used() - room.used_before
    room.loop.run(room.engine.sleep())
    seen["asleep"] = _used() - room.used_before
    room.change()
    room.wake_with_weights()
    seen["after sleep"] = room.gap()
    room.change()
    seen["without a transfer"] = room.gap()
    room.send()
    seen["after a transfer"] = room.gap()
    seen["refused"] = []
    for name, _ in room.model.named_parameters():
        try:
            room.send(spoil=name)
        except TransferError as error:
            seen["refused"].append(name in str(error))
    room.send()
    seen["after refusals"] = room.gap()
    seen["tensors"] = len(list(room.model.parameters()))
    room.engine.shutdown()
    return seen


def _read(payloads: Any, answers: Any) -> None:
    from openrlhf.rollout.transports import Inbox

    torch.cuda.init()
    inbox = Inbox(torch.device("cuda", torch.cuda.current_device()))
    while (payload := payloads.get(timeout=100)) is not None:
        answers.put(inbox.take(payload)[1])


def _send_to_readers(count: int) -> list[float]:
    """Returns: MiB of the sender after each of some buckets of 64 MiB, which ``count`` processes on the card take."""
    from openrlhf.backends.distributed import init_distributed
    from openrlhf.rollout.transports import IpcSender, gpu_uuid

    init_distributed("cuda")
    context = multiprocessing.get_context("spawn")
    answers, payloads = context.Queue(), [context.Queue() for _ in range(count)]
    readers = [context.Process(target=_read, args=(queue, answers), daemon=True) for queue in payloads]
    for reader in readers:
        reader.start()
    sender, held = IpcSender({gpu_uuid(): [f"engine {n}" for n in range(count)]}), []
    for seed in range(4):
        tensors = {"w": torch.full((2**24,), float(seed), device="cuda")}
        offer = sender.put(tensors)
        for n, queue in enumerate(payloads):
            queue.put(offer.payload_for(f"engine {n}"))
        assert [answers.get(timeout=100) for _ in readers] == [offer.checksums] * count
        del tensors
        sender.release()
        held.append(torch.cuda.memory_allocated() / 2**20)
    for queue, reader in zip(payloads, readers, strict=True):
        queue.put(None)
        reader.join(30)
    return held


@pytest.mark.parametrize("count", [1, 2])
def test_memory_that_all_engines_of_a_card_have_taken_is_free_again(count: int) -> None:
    assert on_gpu(_send_to_readers, count) == pytest.approx([0] * 4, abs=1)


@needs_engine
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_an_engine_on_the_card_follows_the_trainer_and_frees_its_memory(tie: bool, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen2", hidden=256, tie=tie)
    seen = on_gpu(_sleep_and_transfer, folder, seconds=400)
    for name in ("start", "after sleep", "after a transfer", "after refusals"):
        assert seen[name] < CLOSE, seen
    assert seen["without a transfer"] > FAR, seen
    assert seen["refused"] == [True] * seen["tensors"], seen
    assert seen["awake"] > 10 and seen["asleep"] < 4, seen
