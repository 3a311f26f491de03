"""Rows laid end to end: nothing is stripped, nothing is shared, and positions count from the start of each row."""

from __future__ import annotations

import pytest
import torch

from openrlhf.data.packed_batch import PackedBatch, empty_batch, pack_rows, take_rows
from openrlhf.data.trajectory import Segment, Trajectory
from openrlhf.trainer.experience import build_experience


def masks(*rows: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(row, dtype=torch.bool) for row in rows]


def test_zeros_inside_an_action_mask_are_no_padding() -> None:
    """Two turns of the policy with a tool's answer between them: seven tokens come in and seven stay."""
    segment = Segment(tokens=[10, 11, 12, 13, 14, 15, 16], action_ranges=[(1, 3), (5, 7)])
    trajectories = [Trajectory(0, i, "p", None, [segment], reward=1.0) for i in range(2)]
    batch = build_experience(trajectories).batch
    assert batch.lengths.tolist() == [7, 7]
    for row in range(2):
        kept = take_rows(batch, [row])
        assert kept.tokens.tolist() == segment.tokens
        # Entry p says whether the step that predicts token p + 1 is trained.
        assert kept.action_mask[1:].int().tolist() == [1, 1, 0, 0, 1, 1]


def test_positions_start_at_the_first_token_of_each_row() -> None:
    batch = pack_rows([[5, 6, 7], [1, 2, 3, 4, 5]], masks([0, 1, 1], [0, 0, 1, 1, 1]))
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert take_rows(batch, [1]).position_ids.tolist() == [0, 1, 2, 3, 4]


def test_padding_is_a_row_of_its_own() -> None:
    """Seven tokens in three rows, filled up to eight for two ranks of a ring."""
    rows = pack_rows([[1, 2, 3], [4, 5], [6, 7]], masks([0, 1, 1], [0, 1], [0, 1]))
    padded = PackedBatch(
        tokens=torch.cat([rows.tokens, torch.zeros(1, dtype=torch.long)]),
        cu_seqlens=torch.cat([rows.cu_seqlens, torch.tensor([8], dtype=torch.int32)]),
        action_mask=torch.cat([rows.action_mask, torch.zeros(1, dtype=torch.bool)]),
        pad_rows=1,
    )
    assert (padded.row_of_token() + 1).tolist() == [1, 1, 1, 2, 2, 3, 3, 4]
    assert padded.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 0]
    assert padded.lengths.tolist() == [3, 2, 2, 1] and padded.num_rows == 4


def test_rows_are_taken_with_all_that_belongs_to_them() -> None:
    batch = pack_rows(
        [[1, 2], [3, 4, 5]],
        masks([0, 1], [0, 0, 1]),
        token_fields={"old_logprobs": [torch.tensor([0.0, -1.0]), torch.tensor([0.0, 0.0, -2.0])]},
        row_fields={"trajectory": torch.tensor([7, 8])},
    )
    turned = take_rows(batch, [1, 0])
    assert turned.tokens.tolist() == [3, 4, 5, 1, 2] and turned.cu_seqlens.tolist() == [0, 3, 5]
    assert turned.token_fields["old_logprobs"].tolist() == [0.0, 0.0, -2.0, 0.0, -1.0]
    assert turned.row_fields["trajectory"].tolist() == [8, 7]


def test_the_first_token_of_a_row_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match="first token of a row"):
        pack_rows([[1, 2], [3, 4]], masks([0, 1], [1, 1]))
    with pytest.raises(ValueError, match="first token of a row"):
        Segment(tokens=[1, 2], action_ranges=[(0, 2)])


def test_a_batch_whose_parts_do_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="old_logprobs has 1 entries for 2 tokens"):
        pack_rows([[1, 2]], masks([0, 1]), token_fields={"old_logprobs": [torch.zeros(1)]})
    with pytest.raises(ValueError, match="cu_seqlens runs from 0 to 3, not 0 to 2"):
        PackedBatch(torch.tensor([1, 2]), torch.tensor([0, 3]), torch.zeros(2, dtype=torch.bool))
    assert empty_batch(3, ["advantages"]).token_fields["advantages"].tolist() == [0.0, 0.0]


def test_a_batch_that_was_moved_is_read_in_host_memory() -> None:
    batch = pack_rows(
        [[1, 2, 3], [4, 5]],
        masks([0, 1, 1], [0, 1]),
        token_fields={"old_logprobs": [torch.zeros(3), torch.ones(2)]},
        row_fields={"trajectory": torch.tensor([7, 8])},
    )
    assert batch.host is batch
    # A device that nothing can be read from, so that a look at it raises.
    there = batch.to("meta")
    for tensor in (there.tokens, there.cu_seqlens, there.action_mask, there.position_ids):
        assert tensor.device.type == "meta"
    assert there.token_fields["old_logprobs"].device.type == there.row_fields["trajectory"].device.type == "meta"
    assert there.host is batch and there.to("meta").host is batch
    assert there.host.lengths.tolist() == [3, 2]
    copy = batch.to("cpu")
    assert copy is not batch and copy.host is copy
    copy.token_fields["more"] = torch.zeros(5)
    assert "more" not in batch.token_fields
