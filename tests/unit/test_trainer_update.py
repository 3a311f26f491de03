"""One rank's optimizer step: losses and sums of micro-batches are added up exactly and read at its end."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf.algorithms.metric_sums import MetricSums
from openrlhf.backends.base import StepResult
from openrlhf.data.packed_batch import PackedBatch, pack_rows
from openrlhf.trainer.policy_update import read_together, run_update

STEP = StepResult(grad_norm=1.0, skipped=False, lr=0.1)


def _backend(given: list[torch.Tensor]) -> Any:
    """The three methods that an update calls; it keeps the shares it is given."""
    return SimpleNamespace(
        device=torch.device("cpu"), backward=given.append, step=lambda: STEP, movement_warning=lambda: "still"
    )


def _micro_batches(count: int) -> list[PackedBatch]:
    return [pack_rows([[n, n + 1]], [torch.tensor([False, True])]) for n in range(count)]


def test_losses_and_sums_of_an_update_are_those_of_its_micro_batches() -> None:
    given: list[torch.Tensor] = []

    def part(batch: PackedBatch) -> tuple[torch.Tensor, MetricSums]:
        number = float(batch.tokens[0])
        # Small beside what came before: in float32 it would be lost.
        share = torch.tensor(1e8 if number == 0 else 1.0, requires_grad=True) * 1
        return share, MetricSums({"kl": torch.tensor(number), "tokens": 2.0}, torch.tensor(3))

    result = run_update(_backend(given), _micro_batches(4), part)
    assert result.loss == 1e8 + 3 and result.sums == {"kl": 6.0, "tokens": 8.0} and result.count == 12.0
    assert result.step is STEP and result.warning == "still"
    assert len(given) == 4 and all(share.requires_grad for share in given)


def test_a_loss_that_is_not_a_number_surfaces() -> None:
    def part(batch: PackedBatch) -> tuple[torch.Tensor, MetricSums]:
        return torch.tensor(math.nan if batch.tokens[0] == 1 else 1.0), MetricSums({}, 1.0)

    assert math.isnan(run_update(_backend([]), _micro_batches(3), part).loss)


def test_scalars_are_read_in_one_transfer_with_what_are_numbers_already() -> None:
    values = {"a": torch.tensor(2.5), "b": 3, "c": torch.tensor(7), "d": torch.tensor(0.1, dtype=torch.float64)}
    assert read_together(values) == {"a": 2.5, "b": 3.0, "c": 7.0, "d": 0.1}
    assert read_together({"b": 3}) == {"b": 3.0}
    assert read_together({"x": torch.tensor(1.0, requires_grad=True)}) == {"x": 1.0}
    with pytest.raises(RuntimeError):
        read_together({"a": torch.zeros(2), "b": torch.zeros(())})
