"""The loop that SFT, reward models and DPO share: the same steps, with another objective in them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from openrlhf.backends.base import Backend
from openrlhf.config.errors import ConfigError
from openrlhf.data.batching import plan_micro_batches, split_updates
from openrlhf.data.packed_batch import PackedBatch
from openrlhf.data.sampler import StatefulSampler
from openrlhf.trainer.device_meter import DeviceMeter
from openrlhf.trainer.supervised_instruments import RankTracer, usage_metrics
from openrlhf.trainer.supervised_outputs import SupervisedOutputs


class Objective(Protocol):
    """A data set and the loss that is taken over it.

    An item is what is never split: a row, or the two rows of a pair. The loss of a step is a mean over units (trained
    tokens, pairs), counted over all ranks and micro-batches, so that it does not depend on how items are dealt out.
    """

    lengths: Sequence[int]
    """Tokens of each item."""

    @property
    def num_items(self) -> int:
        """Items that there are."""
        return len(self.lengths)

    ahead: int = 0
    """Steps that ``announce`` wants to know of."""

    def announce(self, steps: Sequence[Sequence[int]]) -> None:
        """Says which items the next steps take."""

    def window(self, items: Sequence[int]) -> tuple[Objective, list[int]]:
        """Sees to it that some items are at hand.

        Returns: an objective that has them, and their numbers in it; fewer where some turn out to be of no use.
        """
        return self, list(items)

    def pack(self, items: Sequence[int]) -> PackedBatch:
        """Lays items end to end; none makes an empty batch."""

    def row_lengths(self, items: Sequence[int]) -> list[int]:
        """Tokens of each row of the items, which attention does not look beyond."""
        return [int(self.lengths[item]) for item in items]

    def prepared(self, backend: Backend, items: Sequence[int], batches: Iterable[PackedBatch]) -> Iterator[PackedBatch]:
        """Adds what the loss needs beside a forward over the micro-batch; a collective.

        Args:
            items: of the whole step, on all ranks the same.
            batches: this rank's micro-batches of them.

        Yields: the same batches, in order.
        """
        yield from batches

    def units(self, items: Sequence[int]) -> int:
        """How many units the items have."""

    def loss(
        self, backend: Backend, batch: PackedBatch, units: int
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor | float]]:
        """Runs the model.

        Args:
            units: of the whole step.

        Returns: this micro-batch's share of the loss, a scalar, and its shares of further metrics; the sum over ranks
            and micro-batches is the value. Every micro-batch has the same metrics, an empty one too.
        """


@dataclass(frozen=True)
class LoopSettings:
    """The length and the rhythm of a run.

    Attributes:
        batch_size: items of an optimizer step over all ranks; steps of an epoch differ by at most one item.
        micro_batch_size: items of one forward on one rank.
        max_epochs: passes over the data.
        eval_steps: optimizer steps between evaluations, after the last one too; -1 never.
        save_steps: optimizer steps between checkpoints; -1 never.
        profile: first and last step to trace; None traces none.
    """

    batch_size: int
    micro_batch_size: int
    max_epochs: int
    eval_steps: int = -1
    save_steps: int = -1
    profile: tuple[int, int] | None = None


def planned_steps(num_items: int, settings: LoopSettings) -> int:
    """Returns: optimizer steps of the whole run, for the learning-rate schedule."""
    return len(split_updates(num_items, settings.batch_size)) * settings.max_epochs


def train_step(backend: Backend, objective: Objective, items: Sequence[int], micro_batch_size: int) -> dict[str, float]:
    """One optimizer step over ``items``; collective, with the same arguments on all ranks.

    Returns: ``loss/train``, ``actor/grad_norm`` (before clipping), ``actor/lr`` (and ``actor/adam_lr`` beside Muon),
        ``actor/skipped_steps``, and what the objective adds, under ``<name>/train``; the same on all ranks.
    """
    units = objective.units(items)
    sums = _Sums(backend)
    for batch in micro_batches(backend, objective, items, micro_batch_size):
        loss, extra = objective.loss(backend, batch, units)
        backend.backward(loss)
        sums.add(loss, extra)
    result = backend.step()
    step = {"actor/grad_norm": result.grad_norm, "actor/skipped_steps": float(result.skipped)}
    return sums.reduced("train") | step | result.rate_metrics("actor")


@torch.no_grad()
def evaluate(backend: Backend, objective: Objective, micro_batch_size: int) -> dict[str, float]:
    """The objective's mean over all of its data; collective.

    Returns: ``loss/eval`` and what the objective adds, under ``<name>/eval``; the same on all ranks.
    """
    items = range(len(objective.lengths))
    units = objective.units(items)
    sums = _Sums(backend)
    for batch in micro_batches(backend, objective, items, micro_batch_size):
        sums.add(*objective.loss(backend, batch, units))
    return sums.reduced("eval")


def micro_batches(
    backend: Backend, objective: Objective, items: Sequence[int], micro_batch_size: int
) -> Iterator[PackedBatch]:
    """Yields: this rank's share of ``items``, as many micro-batches on every rank."""
    lengths = [int(objective.lengths[item]) for item in items]
    plan = plan_micro_batches(lengths, backend.world_size, micro_batch_size=micro_batch_size)
    packed = (objective.pack([items[place] for place in micro_batch]) for micro_batch in plan[backend.rank])
    yield from objective.prepared(backend, items, packed)


class _Sums:
    """Sums of the loss and of further metrics over micro-batches and then over ranks."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._loss: torch.Tensor | float = 0.0
        self._extra: dict[str, torch.Tensor | float] = {}

    def add(self, loss: torch.Tensor, extra: Mapping[str, torch.Tensor | float]) -> None:
        # Kept as tensors: reading their values would make the host wait for the accelerator after each micro-batch.
        self._loss = self._loss + loss.detach().double()
        for name, value in extra.items():
            self._extra[name] = self._extra.get(name, 0.0) + value

    def reduced(self, part: str) -> dict[str, float]:
        sums = {"loss": self._loss, **self._extra}
        return {f"{name}/{part}": self._backend.all_reduce(float(sums[name])) for name in sorted(sums)}


class SupervisedTrainer:
    """Steps through the epochs, evaluates, writes checkpoints, and goes on from one."""

    def __init__(
        self,
        backend: Backend,
        objective: Objective,
        settings: LoopSettings,
        outputs: SupervisedOutputs,
        *,
        seed: int,
        fixed: Mapping[str, Any] | None = None,
        eval_objective: Objective | None = None,
    ) -> None:
        """Args:
        outputs: where metrics, checkpoints and the model go.
        seed: of the order of the data.
        fixed: settings by flag that a resumed run must share with the one it goes on from, beside the data and the
            seed: the schedule and the optimizer's state follow from them.
        eval_objective: held-out data; None where there is none.
        """
        self.backend = backend
        self.objective = objective
        self.eval_objective = eval_objective
        self.settings = settings
        self.outputs = outputs
        self.fixed = dict(fixed or {})
        self.sampler = StatefulSampler(objective.num_items, seed=seed)
        self.sizes = split_updates(objective.num_items, settings.batch_size)
        self.total_steps = planned_steps(objective.num_items, settings)
        self.step = 0
        self._meter = DeviceMeter(backend)
        self._tracer = RankTracer(backend, settings.profile, outputs)

    def run(self) -> None:
        """Trains from where the newest checkpoint stands (where resuming is asked for) to the end, and exports."""
        state = self.outputs.resume(self.fixed)
        if state is not None:
            self.load_state_dict(state)
            if self.step == self.total_steps:
                self.outputs.note(
                    f"nothing is left to train: the checkpoint stands at the last of {self.total_steps} steps, and its "
                    "model is exported once more"
                )
        self.outputs.open(self.step, self.total_steps)
        while self.step < self.total_steps:
            self._run_epoch()
        self._tracer.close(self.step)
        self.outputs.finish()

    def state_dict(self) -> dict[str, Any]:
        """Returns: where the run stands, beside weights and optimizer."""
        return {"step": self.step, "fixed": self.fixed, "sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to where ``state`` was taken.

        Raises:
            ConfigError: the run that wrote it had other data or another seed.
        """
        try:
            self.sampler.load_state_dict(state["sampler"])
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.step = state["step"]

    def _run_epoch(self) -> None:
        epoch, done = divmod(self.step, len(self.sizes))
        if done == 0:
            self.sampler.set_epoch(epoch)
        name = f"epoch {epoch + 1}/{self.settings.max_epochs}"
        sizes = self.sizes[done:]
        with self.outputs.phase(name, self.sampler.remaining) as bar:
            for place, size in enumerate(sizes, start=1):
                items = self.sampler.next_batch(size)
                if self.objective.ahead:
                    upcoming = self.sampler.peek(sizes[place : place + self.objective.ahead])
                    self.objective.announce([items, *upcoming])
                self._run_step(items)
                bar.update(size)

    def _run_step(self, items: list[int]) -> None:
        settings = self.settings
        self._tracer.begin(self.step + 1)
        metrics = self._train_on(items)
        self.step += 1
        self._tracer.end(self.step)
        last = self.step == self.total_steps
        evaluated = self._due(settings.eval_steps, last) and self.eval_objective is not None
        if evaluated:
            metrics |= evaluate(self.backend, self.eval_objective, settings.micro_batch_size)
        if metrics:
            self.outputs.log(self.step, metrics, always=evaluated or last)
        if self._due(settings.save_steps, False):
            self.outputs.checkpoint(self.step, self.state_dict())

    def _train_on(self, items: list[int]) -> dict[str, float]:
        """One optimizer step. Returns: its metrics; none where no item turns out to be of use, and nothing was done."""
        start = time.perf_counter()
        objective, items = self.objective.window(items)
        if not items:
            self.outputs.warn(f"step {self.step + 1} has no row that can be used, and changes nothing")
            return {}
        with self._meter.training():
            metrics = train_step(self.backend, objective, items, self.settings.micro_batch_size)
        seconds = time.perf_counter() - start
        if (standstill := self.backend.movement_warning()) is not None:
            self.outputs.warn(standstill)
        lengths = [int(objective.lengths[item]) for item in items]
        metrics |= {"time/step": seconds, "throughput/tokens_per_s": sum(lengths) / seconds}
        return metrics | usage_metrics(self.backend, self._meter.take(), objective.row_lengths(items))

    def _due(self, every: int, last: bool) -> bool:
        return every > 0 and (self.step % every == 0 or last)
