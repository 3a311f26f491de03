"""Direct preference optimisation and its relatives: what `train_dpo` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch

from openrlhf.algorithms.preference_loss import (
    PairInputs,
    chosen_nll,
    kto_reference_point,
    pair_metrics,
    preference_loss,
    response_sums,
)
from openrlhf.backends.base import Backend
from openrlhf.backends.deepspeed_backend import DeepSpeedBackend
from openrlhf.config import DPOConfig, DPOModelConfig
from openrlhf.data.batching import plan_micro_batches
from openrlhf.data.packed_batch import PackedBatch
from openrlhf.data.pair_packing import pack_mismatched, pack_pairs
from openrlhf.data.preference import PreferenceDataset
from openrlhf.data.rows import Rows
from openrlhf.data.streaming import StreamedRows
from openrlhf.trainer.pairs import tokenise_pairs
from openrlhf.trainer.reference import ReferenceModel, as_row_field, precomputed, reference_path
from openrlhf.trainer.streamed import objective_over
from openrlhf.trainer.supervised import Objective
from openrlhf.trainer.supervised_run import check_vocabulary, run_supervised, train_and_export, training_backend

REF_LOGPROBS, POINT = "ref_logprobs", "reference_point"
# Micro-batches that a reference is asked about at one time.
GROUP = 64


class DPOObjective(Objective):
    """A preference loss, as a mean over the pairs of an optimizer step."""

    def __init__(
        self,
        data: PreferenceDataset,
        model: DPOModelConfig,
        pad_token_id: int,
        *,
        reference: ReferenceModel | None = None,
        table: torch.Tensor | None = None,
        micro_batch_size: int = 1,
    ) -> None:
        """Args:
        model: the loss and its parameters.
        pad_token_id: fills the batch of a rank that is short of pairs.
        reference: asked during training; None where ``table`` is given or the loss has no reference.
        table: float64 [pairs, 2], what the reference said about every pair.
        micro_batch_size: pairs of a forward that is not the loss's own.
        """
        self._data = data
        self._model = model
        self._pad_token_id = pad_token_id
        self._reference = reference
        self._table = table
        self._micro_batch_size = micro_batch_size
        self.lengths = data.lengths

    def pack(self, items: Sequence[int]) -> PackedBatch:
        """Lays pairs end to end, the chosen row of each before its rejected one."""
        batch = pack_pairs(self._data, items, self._pad_token_id)
        if self._table is not None:
            batch.row_fields[REF_LOGPROBS] = as_row_field(self._table, items)
        return batch

    def prepared(self, backend: Backend, items: Sequence[int], batches: Iterable[PackedBatch]) -> Iterator[PackedBatch]:
        """Yields: the batches, with what the reference says about them where it is asked during training."""
        if self._reference is None:
            yield from batches
            return
        point = self._reference_point(backend, items) if self._model.loss == "kto" else None
        # An offloaded reference comes and goes once for a group, not for every micro-batch.
        rest = iter(batches)
        while group := list(islice(rest, GROUP)):
            with self._reference.at_hand():
                for batch in group:
                    batch.row_fields[REF_LOGPROBS] = self._reference.sums(batch)
                    if point is not None:
                        batch.row_fields[POINT] = torch.full((batch.num_rows,), point, dtype=torch.float64)
            yield from group

    def _reference_point(self, backend: Backend, items: Sequence[int]) -> float:
        """z0 of KTO over the whole step, whose pairs lend each other their responses; 0 for a single pair."""
        if len(items) < 2:
            return 0.0
        total = backend.all_reduce(float(self.mismatched_ratios(backend, items).sum()))
        return float(kto_reference_point(torch.tensor(total, dtype=torch.float64), 2 * len(items)))

    @torch.no_grad()
    def mismatched_ratios(self, backend: Backend, items: Sequence[int]) -> torch.Tensor:
        """Returns: float64, log-ratios of policy to reference of this rank's share of the responses of each pair,
        set after the prompt of the pair before it (the first pair's after that of the last).
        """
        lent = list(zip(items, [*items[1:], items[0]], strict=True))
        lengths = [int(self.lengths[item]) for item in items]
        plan = plan_micro_batches(lengths, backend.world_size, micro_batch_size=self._micro_batch_size)
        found = [torch.zeros(0, dtype=torch.float64, device=backend.device)]
        with self._reference.at_hand():
            for places in plan[backend.rank]:
                batch = pack_mismatched(self._data, [lent[place] for place in places], self._pad_token_id)
                batch = batch.to(backend.device)
                ref_sums = self._reference.sums(batch)
                sums, _ = response_sums(backend.forward(batch).logprobs, batch.action_mask, batch.cu_seqlens)
                found.append((sums - ref_sums)[: batch.num_rows - batch.pad_rows])
        return torch.cat(found)

    def row_lengths(self, items: Sequence[int]) -> list[int]:
        """Tokens of the rows of the pairs."""
        return self._data.row_lengths(items)

    def units(self, items: Sequence[int]) -> int:
        """Pairs."""
        return len(items)

    def loss(
        self, backend: Backend, batch: PackedBatch, units: int
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor | float]]:
        """This batch's share of the mean over ``units`` pairs."""
        batch = batch.to(backend.device)
        ref_sums, point = batch.row_fields.get(REF_LOGPROBS), batch.row_fields.get(POINT)
        sums, tokens = response_sums(backend.forward(batch).logprobs, batch.action_mask, batch.cu_seqlens)
        rows = batch.num_rows - batch.pad_rows
        chosen, rejected = slice(0, rows, 2), slice(1, rows, 2)
        inputs = PairInputs(
            sums[chosen],
            sums[rejected],
            None if ref_sums is None else ref_sums[chosen],
            None if ref_sums is None else ref_sums[rejected],
            tokens[chosen],
            tokens[rejected],
            beta=self._model.beta,
            label_smoothing=self._model.label_smoothing,
            ipo_sum=self._model.ipo_sum_enable,
            simpo_gamma=self._model.simpo_gamma,
            reference_point=point if point is None else point[0],
            desirable_weight=self._model.kto_desirable_weight,
            undesirable_weight=self._model.kto_undesirable_weight,
        )
        losses, nll = preference_loss(self._model.loss, inputs), chosen_nll(inputs)
        total = losses.loss.sum() + self._model.nll_loss_coef * nll.sum()
        metrics = {name: values.sum() / units for name, values in pair_metrics(losses, nll).items()}
        return (total / units).float(), metrics


def run(config: DPOConfig) -> None:
    """Trains a model on pairs of responses and writes it to --ckpt.output_dir.

    Every rank of a launcher calls it; without a launcher the process is the only rank.

    Raises:
        ConfigError, DataError: the settings or the data cannot be used, or another run writes into the same folder.
        RankError: something could not be written or read, on all ranks.
    """
    run_supervised(config, tokenise, train)


def train(
    config: DPOConfig,
    tokenizer: Any,
    data: PreferenceDataset | StreamedRows,
    evaluation: PreferenceDataset | None,
    *,
    device: str,
) -> DeepSpeedBackend:
    """Trains and exports, in a process group that stands; collective.

    Args:
        data: of training.
        evaluation: held out; None where there is none.
        device: "cpu" or "cuda".

    Returns: the backend with the trained model.
    """
    parts = {"training": data} | ({} if evaluation is None else {"evaluation": evaluation})
    if config.reference_below_adapters:
        backend = _checked_backend(config, parts, device)
        reference = ReferenceModel(backend, below_adapters=True)
        objectives = _objectives(config, parts, tokenizer.pad_token_id, lambda _: reference)
    else:
        # A reference that is asked before training is given up before the model is loaded.
        load = partial(ReferenceModel.load, config, device=device)
        objectives = _objectives(config, parts, tokenizer.pad_token_id, load)
        backend = _checked_backend(config, parts, device)
    train_and_export(
        config,
        backend,
        tokenizer,
        objectives["training"],
        objectives.get("evaluation"),
        title="Direct preference optimisation",
        fixed=_fixed_loss(config),
    )
    return backend


def _checked_backend(
    config: DPOConfig, parts: Mapping[str, PreferenceDataset | StreamedRows], device: str
) -> DeepSpeedBackend:
    backend = training_backend(config, device, len(parts["training"]))
    check_vocabulary(backend, list(parts.values()), config.model.model_name_or_path)
    return backend


def _objectives(
    config: DPOConfig,
    parts: Mapping[str, PreferenceDataset | StreamedRows],
    pad_token_id: int,
    load: Callable[[list[PreferenceDataset]], ReferenceModel],
) -> dict[str, Objective]:
    """Args:
        parts: data by name.
        load: makes the reference that is asked about some of them.

    Returns: their objectives; what the reference has to say is at hand.
    """
    reference, tables = None, {}
    if config.model.has_reference and config.ref.precompute:
        tables = precomputed(config, parts, load, pad_token_id=pad_token_id)
    elif config.model.has_reference:
        reference = load(list(parts.values()))
    return {
        name: objective_over(
            data,
            partial(
                DPOObjective,
                model=config.model,
                pad_token_id=pad_token_id,
                reference=reference,
                table=tables.get(name),
                micro_batch_size=config.train.micro_batch_size,
            ),
        )
        for name, data in parts.items()
    }


def _fixed_loss(config: DPOConfig) -> dict[str, Any]:
    model = config.model
    found: dict[str, Any] = {
        "--model.loss_type": model.loss,
        "--model.beta": model.beta,
        "--model.label_smoothing": model.label_smoothing,
        "--model.nll_loss_coef": model.nll_loss_coef,
    }
    if model.loss == "ipo":
        found["--model.ipo_sum_enable"] = model.ipo_sum_enable
    if model.loss == "kto":
        found["--model.kto_desirable_weight"] = model.kto_desirable_weight
        found["--model.kto_undesirable_weight"] = model.kto_undesirable_weight
    if model.loss == "simpo":
        found["--model.simpo_gamma"] = model.simpo_gamma
    if model.has_reference:
        found["--ref.model_name_or_path"] = reference_path(config)
    return found


def tokenise(
    config: DPOConfig, rows: Rows, tokenizer: Any, *, progress: bool = False, workers: int = 0
) -> PreferenceDataset:
    """Returns: the data that the rows make.

    Raises: ConfigError, DataError.
    """
    return tokenise_pairs(config, rows, tokenizer, margin=False, progress=progress, workers=workers)
