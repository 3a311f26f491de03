"""The one shape in which tokens reach a model: rows laid end to end, no padding between them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns: the tensor on ``device``; neither side waits for the other when it goes from the host to a GPU."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        # From ordinary memory the copy would wait for the work that is queued on the GPU.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass
class PackedBatch:
    """One micro-batch of one rank: N rows of T tokens in all.

    Every per-token tensor is aligned to the token it describes: ``action_mask[t]`` is 1 where token t is trained (the
    policy produced it, or it is part of an SFT target), and a log-prob at t is ``log p(token[t] | tokens before t)``.

    Attributes:
        tokens: int64 [T].
        cu_seqlens: int32 [N + 1], 0 first, T last.
        action_mask: bool [T]; False at the first token of every row.
        token_fields: further per-token tensors [T] (old_logprobs, ref_logprobs, rollout_logprobs, advantages, ...).
        row_fields: per-row tensors [N] (trajectory, reward, margin, pair, ...).
        pad_rows: trailing rows that only fill up (mask 0, own ``cu_seqlens`` entry).
        position_ids: int64 [..., T]; None means 0, 1, 2, ... in each row.
        model_inputs: pixels and the like, handed to the model as they are.
    """

    tokens: torch.Tensor
    cu_seqlens: torch.Tensor
    action_mask: torch.Tensor
    token_fields: dict[str, torch.Tensor] = field(default_factory=dict)
    row_fields: dict[str, torch.Tensor] = field(default_factory=dict)
    pad_rows: int = 0
    position_ids: torch.Tensor | None = None
    model_inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    _host: PackedBatch | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        total = self.tokens.numel()
        if int(self.cu_seqlens[0]) != 0 or int(self.cu_seqlens[-1]) != total:
            raise ValueError(
                f"cu_seqlens runs from {int(self.cu_seqlens[0])} to {int(self.cu_seqlens[-1])}, not 0 to {total}"
            )
        for name, tensor in {"action_mask": self.action_mask, **self.token_fields}.items():
            if tensor.shape[-1] != total:
                raise ValueError(f"{name} has {tensor.shape[-1]} entries for {total} tokens")
        starts = self.cu_seqlens[:-1].long()
        if total and bool(self.action_mask[starts[starts < total]].any()):
            raise ValueError("the first token of a row has nothing before it, so its action_mask must be 0")
        if self.position_ids is None:
            lengths = self.lengths
            offsets = torch.repeat_interleave(starts, lengths)
            self.position_ids = torch.arange(total, device=self.tokens.device) - offsets

    @property
    def lengths(self) -> torch.Tensor:
        """Returns: int64 [N], tokens of each row."""
        return (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).long()

    @property
    def num_rows(self) -> int:
        """Rows, trailing pad rows included."""
        return self.cu_seqlens.numel() - 1

    def row_of_token(self) -> torch.Tensor:
        """Returns: int64 [T], the row that each token stands in."""
        return torch.repeat_interleave(torch.arange(self.num_rows, device=self.tokens.device), self.lengths)

    @property
    def host(self) -> PackedBatch:
        """This batch in host memory: where sizes and places are read, since reading them off a GPU waits for it."""
        if self.tokens.device.type == "cpu":
            return self
        if self._host is None:
            self._host = self.to("cpu")
        return self._host

    def to(self, device: torch.device | str) -> PackedBatch:
        """Returns: the same batch with every tensor on ``device``."""
        device = torch.device(device)
        there = copy.copy(self)  # Not a new one: its checks would wait for the device, and have passed already.
        for name in ("tokens", "cu_seqlens", "action_mask", "position_ids"):
            setattr(there, name, moved(getattr(self, name), device))
        for name in ("token_fields", "row_fields", "model_inputs"):
            setattr(there, name, {key: moved(tensor, device) for key, tensor in getattr(self, name).items()})
        on_host = self if self.tokens.device.type == "cpu" else self._host
        there._host = None if device.type == "cpu" else on_host
        return there


def pack_rows(
    rows: Sequence[Sequence[int] | torch.Tensor],
    action_masks: Sequence[torch.Tensor],
    token_fields: dict[str, Sequence[torch.Tensor]] | None = None,
    row_fields: dict[str, torch.Tensor] | None = None,
) -> PackedBatch:
    """Lays rows end to end.

    Args:
        rows: N rows of token ids.
        action_masks: N bool tensors, each as long as its row.
        token_fields: per name, N tensors each as long as its row.
        row_fields: per name, a tensor [N].
    """
    tokens = [torch.as_tensor(row, dtype=torch.long) for row in rows]
    lengths = torch.tensor([0] + [row.numel() for row in tokens])
    return PackedBatch(
        tokens=torch.cat(tokens),
        cu_seqlens=lengths.cumsum(0).to(torch.int32),
        action_mask=torch.cat([mask.bool() for mask in action_masks]),
        token_fields={name: torch.cat(list(parts)) for name, parts in (token_fields or {}).items()},
        row_fields=dict(row_fields or {}),
    )


def take_rows(batch: PackedBatch, rows: Sequence[int]) -> PackedBatch:
    """Returns: a batch of the given rows, in the given order, with all their fields (``model_inputs`` stay whole)."""
    starts = batch.cu_seqlens.tolist()
    index = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in rows])
    chosen = torch.tensor(list(rows))
    lengths = batch.lengths[chosen]
    return PackedBatch(
        tokens=batch.tokens[index],
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to(torch.int32),
        action_mask=batch.action_mask[index],
        token_fields={name: field[..., index] for name, field in batch.token_fields.items()},
        row_fields={name: field[chosen] for name, field in batch.row_fields.items()},
        position_ids=batch.position_ids[..., index],
        model_inputs=batch.model_inputs,
    )


def empty_batch(pad_token_id: int, token_fields: Sequence[str] = ()) -> PackedBatch:
    """A batch for a rank that is short of work: one pad row of two tokens, nothing trained, so that its loss is 0.

    Two tokens, and not none, because every rank must run the same forward under sharded parameters.
    """
    return PackedBatch(
        tokens=torch.full((2,), pad_token_id, dtype=torch.long),
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
        action_mask=torch.zeros(2, dtype=torch.bool),
        token_fields={name: torch.zeros(2) for name in token_fields},
        pad_rows=1,
    )
