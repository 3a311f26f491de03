"""Preference pairs as rows of a packed batch: a pair is never split."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from openrlhf.data.packed_batch import PackedBatch, empty_batch, pack_rows
from openrlhf.data.preference import PreferenceDataset


def pack_pairs(data: PreferenceDataset, pairs: Sequence[int], pad_token_id: int) -> PackedBatch:
    """Lays pairs end to end, the two rows of each side by side: row 2k is the chosen one of ``pairs[k]``, row 2k + 1
    the rejected one.

    Args:
        pairs: numbers of K pairs; none makes the batch of a rank that is short of work, one pad row.
        pad_token_id: fills that batch.

    Returns: a batch whose ``action_mask`` marks the responses, with the row fields ``pair`` (int64 [2K], the number of
        the row's pair in ``data``) and ``margin`` (float32 [2K], the pair's, in both of its rows).
    """
    if not len(pairs):
        batch = empty_batch(pad_token_id)
        batch.row_fields = {"pair": torch.tensor([-1]), "margin": torch.zeros(1)}
        return batch
    records = [data[pair] for pair in pairs]
    numbers = torch.tensor([int(pair) for pair in pairs])
    margins = torch.tensor([record.margin for record in records], dtype=torch.float32)
    return pack_rows(
        [row for record in records for row in (record.chosen, record.rejected)],
        [mask for record in records for mask in (record.chosen_mask, record.rejected_mask)],
        row_fields={"pair": numbers.repeat_interleave(2), "margin": margins.repeat_interleave(2)},
    )


def pack_mismatched(data: PreferenceDataset, pairs: Sequence[tuple[int, int]], pad_token_id: int) -> PackedBatch:
    """Lays prompts end to end, each before the two responses of another pair and cut at the length that rows may have.

    Args:
        pairs: K times the pair that the prompt comes from, and the one that the responses come from; none makes the
            batch of a rank that is short of work, one pad row.
        pad_token_id: fills that batch.

    Returns: a batch of 2K rows whose ``action_mask`` marks the responses: row 2k with the chosen, 2k + 1 the rejected.
    """
    if not len(pairs):
        return empty_batch(pad_token_id)
    rows, masks = [], []
    for first, second in pairs:
        prompt_of, other = data[first], data[second]
        prompt = prompt_of.chosen[: _start_of(prompt_of.chosen_mask)]
        for tokens, mask in ((other.chosen, other.chosen_mask), (other.rejected, other.rejected_mask)):
            start = _start_of(mask)
            rows.append((prompt + tokens[start:])[: data.max_len])
            masks.append(torch.cat([torch.zeros(len(prompt), dtype=torch.bool), mask[start:]])[: data.max_len])
    return pack_rows(rows, masks)


def _start_of(mask: torch.BoolTensor) -> int:
    return int(mask.int().argmax())
