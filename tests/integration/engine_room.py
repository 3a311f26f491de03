"""A real engine beside the plain transformers model whose weights it is given, and all ways to give them wrongly."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from openrlhf.backends.weights import full_parameters
from openrlhf.rollout.engine_files import EngineFiles
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.transfer import Bucket, Exchange, buckets, write_bucket
from openrlhf.rollout.vllm_engine import VllmEngine, make_sampling_params
from tests.tiny_models import make_tiny_model

PROMPT = [5, 6, 7, 8]
MAX_LENGTH = 256

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Sample:
    """What the engine sampled, with its log-probs."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Update:
    """A whole weight update as the sender would make it, or one with a fault."""

    buckets: list[Bucket]
    manifest: dict[str, int]


class Room:
    """One engine and one model.

    Attributes:
        model: plain transformers, fp32: what the engine's log-probs have to be.
        old: its weights before the last ``change``.
    """

    def __init__(self, folder: Path, architecture: str, **model: Any) -> None:
        # vLLM's attention on the CPU wants heads of 32 or more.
        path = make_tiny_model(folder / "model", architecture, hidden=128, **model)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._first = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        self.old: Tensors = self.tensors()
        self._exchange = Exchange()
        self._folder = self._exchange.folder(64 * 2**20)
        self._files = itertools.count()
        self._seeds = itertools.count(100)
        self._runner = asyncio.Runner()
        self._engine_files = EngineFiles()
        self.engine: VllmEngine = self.run(self._start(str(path)), timeout=240)

    async def _start(self, model: str) -> VllmEngine:
        spec = EngineSpec(
            model=model,
            dtype="float32",
            max_model_len=MAX_LENGTH,
            seed=0,
            max_num_seqs=16,
            enable_prefix_caching=True,
            kv_cache_bytes=64 * 2**20,
        )
        with self._engine_files.starting():
            engine = VllmEngine(spec, self._engine_files)
        await engine.start()
        return engine

    def close(self) -> None:
        """Ends the engine."""
        self.engine.shutdown()
        self._engine_files.close()
        self._runner.close()
        shutil.rmtree(self._folder)

    def run(self, work: Awaitable[Any], timeout: float = 60) -> Any:
        """Waits for calls of the engine."""
        return self._runner.run(asyncio.wait_for(work, timeout))

    def tensors(self) -> Tensors:
        """Returns: a copy of the model's weights as a trainer sends them; tied ones once."""
        return {name: tensor.clone() for name, tensor in full_parameters(self.model, sharded=False)}

    def change(self) -> None:
        """Gives the model other weights, each of them near its first one."""
        self.old = self.tensors()
        generator = torch.Generator().manual_seed(next(self._seeds))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self._first[name] + 0.05 * torch.randn(parameter.shape, generator=generator))

    async def _sample(
        self, prompt: list[int], seed: int | None, temperature: float, top_p: float, tokens: int
    ) -> Sample:
        params = make_sampling_params(max_tokens=tokens, temperature=temperature, top_p=top_p, seed=seed, logprobs=True)
        params.ignore_eos = True
        output = (await self.engine.generate(prompt, params)).outputs[0]
        ids = list(output.token_ids)
        return Sample(prompt, ids, [entry[token].logprob for entry, token in zip(output.logprobs, ids, strict=True)])

    def sample(
        self,
        prompts: Sequence[list[int]] = (PROMPT,),
        *,
        seeds: Sequence[int | None] | None = None,
        temperature: float = 0.6,
        top_p: float = 1.0,
        tokens: int = 8,
    ) -> list[Sample]:
        """Samples every prompt once, all in one batch."""

        async def batch() -> list[Sample]:
            pairs = zip(prompts, seeds or range(len(prompts)), strict=True)
            return await asyncio.gather(*[self._sample(p, s, temperature, top_p, tokens) for p, s in pairs])

        return self.run(batch())

    def distributions(self, sample: Sample, temperature: float) -> torch.Tensor:
        """Returns: log-probs of the model [sampled tokens, vocabulary], by the definition."""
        with torch.no_grad():
            logits = self.model(torch.tensor([sample.prompt + sample.tokens])).logits[0]
        return (logits[len(sample.prompt) - 1 : -1] / temperature).log_softmax(-1)

    def gap(self, sample: Sample, temperature: float = 0.6) -> float:
        """Returns: the largest difference between the log-probs of engine and model."""
        expected = self.distributions(sample, temperature).gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
        return float((expected - torch.tensor(sample.logprobs)).abs().max())

    def pack(self, tensors: Tensors, max_bytes: int = 2**30) -> list[Bucket]:
        """Writes tensors as buckets."""
        return [
            write_bucket(self._folder, next(self._files), group)
            for group in buckets(tensors.items(), torch.float32, max_bytes)
        ]

    def whole(self, max_bytes: int = 2**30) -> Update:
        """Returns: a right update to the model's weights."""
        return update_of(self.pack(self.tensors(), max_bytes))

    def send(self, update: Update, version: int = 1) -> None:
        """Does an update and removes its files."""

        async def steps() -> None:
            await self.engine.begin_update()
            for bucket in update.buckets:
                await self.engine.load_bucket(bucket.payload, bucket.checksums)
            await self.engine.end_update(update.manifest, version)

        try:
            self.run(steps())
        finally:
            for bucket in update.buckets:
                Path(bucket.path).unlink(missing_ok=True)


def update_of(packed: list[Bucket]) -> Update:
    """Returns: the update whose manifest is what its buckets announce."""
    return Update(packed, {name: value for bucket in packed for name, value in bucket.checksums.items()})


def rewrite(bucket: Bucket, edit: Callable[[Tensors], Tensors]) -> None:
    """Changes what lies in a bucket's file, and not what is announced of it."""
    # Copied, since what is loaded may still be mapped from the file that is written.
    held = {name: tensor.clone() for name, tensor in load_file(bucket.path).items()}
    save_file(edit(held), bucket.path)


def without(tensors: Tensors, name: str) -> Tensors:
    """Returns: all but ``name``."""
    return {other: tensor for other, tensor in tensors.items() if other != name}


def never_sent(room: Room, name: str) -> Update:
    """The sender itself does not know the tensor: only the engine can miss it."""
    return update_of(room.pack(without(room.tensors(), name)))


def lost_from_its_bucket(room: Room, name: str) -> Update:
    """Announced with its bucket, and not in the file."""
    update = room.whole()
    rewrite(update.buckets[0], lambda held: without(held, name))
    return update


def lost_with_its_announcement(room: Room, name: str) -> Update:
    """In the manifest alone."""
    return Update(never_sent(room, name).buckets, room.whole().manifest)


def sent_twice(room: Room, name: str) -> Update:
    """In two buckets."""
    return update_of(room.pack(room.tensors()) + room.pack({name: room.tensors()[name]}))


def stale(room: Room, name: str) -> Update:
    """The file holds what the tensor was before."""
    update = room.whole()
    rewrite(update.buckets[0], lambda held: {**held, name: room.old[name]})
    return update


def swapped(room: Room, name: str) -> Update | None:
    """The file holds another tensor of the same shape in its place, and it in the other's. None where none has it."""
    tensors = room.tensors()
    other = next((o for o in tensors if o != name and tensors[o].shape == tensors[name].shape), None)
    if other is None:
        return None
    update = room.whole()
    rewrite(update.buckets[0], lambda held: {**held, name: held[other], other: held[name]})
    return update


FAULTS = [never_sent, lost_from_its_bucket, lost_with_its_announcement, sent_twice, stale, swapped]
