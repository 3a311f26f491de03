"""Reward models: what `train_rm` runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from openrlhf.algorithms.preference_reward import pairwise_loss
from openrlhf.backends.base import Backend
from openrlhf.backends.deepspeed_backend import DeepSpeedBackend
from openrlhf.config import RMConfig
from openrlhf.config.model import RMModelConfig
from openrlhf.data.packed_batch import PackedBatch
from openrlhf.data.pair_packing import pack_pairs
from openrlhf.data.preference import PreferenceDataset
from openrlhf.data.rows import Rows
from openrlhf.data.streaming import StreamedRows
from openrlhf.models.loading import keep_pad_apart, load_config
from openrlhf.models.value_head import HeadSpec
from openrlhf.trainer.pairs import tokenise_pairs
from openrlhf.trainer.streamed import objective_over
from openrlhf.trainer.supervised import Objective, micro_batches
from openrlhf.trainer.supervised_run import check_vocabulary, run_supervised, train_and_export, training_backend

# Pairs that are scored for the mean and the deviation of rewards: enough for two digits of both.
STATISTICS_PAIRS = 2048


class RewardObjective(Objective):
    """The pairwise loss, as a mean over the pairs of an optimizer step."""

    def __init__(self, data: PreferenceDataset, model: RMModelConfig, pad_token_id: int) -> None:
        """Args:
        model: which loss, and whether it reads margins.
        pad_token_id: fills the batch of a rank that is short of pairs.
        """
        self._data = data
        self._kind = model.loss_type
        self._margin = model.margin_loss_enable
        self._pad_token_id = pad_token_id
        self.lengths = data.lengths

    def pack(self, items: Sequence[int]) -> PackedBatch:
        """Lays pairs end to end, the two rows of each side by side."""
        return pack_pairs(self._data, items, self._pad_token_id)

    def row_lengths(self, items: Sequence[int]) -> list[int]:
        """Tokens of the rows of the pairs."""
        return self._data.row_lengths(items)

    def units(self, items: Sequence[int]) -> int:
        """Pairs."""
        return len(items)

    def scores(self, backend: Backend, batch: PackedBatch) -> torch.Tensor:
        """Returns: float32 [K, 2], the scores of the chosen and of the rejected row of each pair."""
        rows = batch.num_rows - batch.pad_rows
        return backend.row_scores(batch)[:rows].reshape(rows // 2, 2)

    def loss(
        self, backend: Backend, batch: PackedBatch, units: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor | float]]:
        """This batch's share of the mean loss over ``units`` pairs, and of accuracy and rewards."""
        batch = batch.to(backend.device)
        chosen, rejected = self.scores(backend, batch).unbind(1)
        margin = batch.row_fields["margin"][: 2 * len(chosen) : 2] if self._margin else None
        losses = pairwise_loss(chosen, rejected, margin, kind=self._kind)
        better, worse = chosen.detach().double(), rejected.detach().double()
        sums = {
            "accuracy": (better > worse).double(),
            "reward_chosen": better,
            "reward_rejected": worse,
            "reward_gap": better - worse,
        }
        return losses.sum() / units, {name: values.sum() / units for name, values in sums.items()}


@torch.no_grad()
def reward_statistics(backend: Backend, objective: Objective, micro_batch_size: int) -> tuple[float, float, int]:
    """Scores the rows of up to ``STATISTICS_PAIRS`` pairs, spread evenly over the data; collective.

    Returns: mean and unbiased standard deviation of the scores, chosen and rejected ones together, and how many pairs.
        The deviation of scores that are all equal is given as 1, by which they can be divided. Where none of the pairs
        can be used, as rows that are tokenised in their turn may be, 0 and 1, which leave scores as they are, and 0.
    """
    pairs = objective.num_items
    count = min(pairs, STATISTICS_PAIRS)
    objective, items = objective.window([place * pairs // count for place in range(count)])
    count = len(items)
    if not count:
        return 0.0, 1.0, 0
    found = [
        objective.scores(backend, batch).flatten().double()
        for batch in micro_batches(backend, objective, items, micro_batch_size)
    ]
    scores = torch.cat(found)
    mean = backend.all_reduce(float(scores.sum())) / (2 * count)
    squares = backend.all_reduce(float((scores - mean).square().sum()))
    return mean, math.sqrt(squares / (2 * count - 1)) or 1.0, count


def record_statistics(backend: Backend, objective: Objective, micro_batch_size: int, kind: str) -> str:
    """Has the exported config hold what --reward.normalize_enable reads; collective.

    Args:
        kind: of the pairs, "training" or "held-out".

    Returns: a line on what was recorded.
    """
    mean, std, pairs = reward_statistics(backend, objective, micro_batch_size)
    # Without a pair too: the head is new, and the model that it was put on may come with statistics of its own.
    backend.set_reward_statistics(mean, std)
    if not pairs:
        return (
            f"warning: of the {kind} pairs that were drawn for the statistics of rewards none can be used: config.json "
            "gets mean 0 and standard deviation 1, by which --reward.normalize_enable changes nothing"
        )
    return f"rewards of {pairs} {kind} pairs: mean {mean:.4g}, standard deviation {std:.4g}, kept in config.json"


def run(config: RMConfig) -> None:
    """Trains a reward model on pairs of responses and writes it to --ckpt.output_dir.

    Every rank of a launcher calls it; without a launcher the process is the only rank.

    Raises:
        ConfigError, DataError: the settings or the data cannot be used, or another run writes into the same folder.
        RankError: something could not be written or read, on all ranks.
    """
    run_supervised(config, tokenise, train)


def train(
    config: RMConfig,
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
    _separate_padding(config, tokenizer)
    head = HeadSpec(
        prefix=config.ds.value_head_prefix, fresh=True, seed=config.train.seed, pad_token_id=tokenizer.pad_token_id
    )
    backend = training_backend(config, device, len(data), head)
    check_vocabulary(backend, [data] if evaluation is None else [data, evaluation], config.model.model_name_or_path)
    objective = objective_over(data, lambda part: RewardObjective(part, config.model, tokenizer.pad_token_id))
    held_out = None if evaluation is None else RewardObjective(evaluation, config.model, tokenizer.pad_token_id)
    # Held-out pairs tell best what the model will say of new ones.
    scored, kind = (objective, "training") if held_out is None else (held_out, "held-out")
    train_and_export(
        config,
        backend,
        tokenizer,
        objective,
        held_out,
        title="Reward model training",
        fixed={
            "--model.loss_type": config.model.loss_type,
            "--model.margin_loss_enable": config.model.margin_loss_enable,
        },
        before_export=partial(record_statistics, backend, scored, config.train.micro_batch_size, kind),
    )
    return backend


def _separate_padding(config: RMConfig, tokenizer: Any) -> None:
    """The tokenizer is exported with the model; where no token is left to pad with, attaching the head warns."""
    loaded = load_config(config.model.model_name_or_path, trust_remote_code=config.trust_remote_code)
    ends = loaded.get_text_config().eos_token_id
    keep_pad_apart(tokenizer, ends if isinstance(ends, list) else [ends])


def tokenise(
    config: RMConfig, rows: Rows, tokenizer: Any, *, progress: bool = False, workers: int = 0
) -> PreferenceDataset:
    """Returns: the data that the rows make.

    Raises: ConfigError, DataError.
    """
    margin = config.model.margin_loss_enable
    return tokenise_pairs(config, rows, tokenizer, margin=margin, progress=progress, workers=workers)
