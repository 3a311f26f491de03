"""The order in which rows are used, and where in it a run stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class StatefulSampler:
    """Walks through the rows of a data set, epoch by epoch, and can be stopped and resumed at any row.

    The order of an epoch follows from (seed, epoch) alone. It is global: ranks and micro-batches share out what
    ``next_batch`` gives, so it is the same for every number of ranks. (A DeepSpeed checkpoint is not: it wants the
    ranks that wrote it.)
    """

    def __init__(self, num_items: int, *, seed: int, shuffle: bool = True) -> None:
        """Raises: ValueError for a data set without rows."""
        if num_items < 1:
            raise ValueError("there is nothing to draw: the data set has no rows")
        self.num_items = num_items
        self.seed = seed
        self.shuffle = shuffle
        self.set_epoch(0)

    @property
    def epoch(self) -> int:
        """The running epoch, from 0."""
        return self._epoch

    @property
    def offset(self) -> int:
        """Rows of this epoch that were given out."""
        return self._offset

    @property
    def remaining(self) -> int:
        """Rows of this epoch that are left."""
        return self.num_items - self._offset

    def next_batch(self, n: int) -> list[int]:
        """Returns: the next ``n`` rows of this epoch, fewer at its end, none once it has ended.

        A batch never reaches into the next epoch: call ``set_epoch`` to begin it.
        """
        if n < 1:
            raise ValueError(f"a batch has at least one row, not {n}")
        batch = self._order[self._offset : self._offset + n]
        self._offset += len(batch)
        return batch.tolist()

    def peek(self, sizes: Sequence[int]) -> list[list[int]]:
        """Returns: the batches of these sizes that ``next_batch`` will give, as far as this epoch goes."""
        ends = [self._offset + sum(sizes[: place + 1]) for place in range(len(sizes))]
        return [self._order[end - size : end].tolist() for end, size in zip(ends, sizes, strict=True)]

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of ``epoch``."""
        if epoch < 0:
            raise ValueError(f"epochs count from 0, not {epoch}")
        self._epoch = epoch
        self._offset = 0
        if self.shuffle:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.num_items)
        else:
            self._order = np.arange(self.num_items)

    def state_dict(self) -> dict[str, Any]:
        """Returns: all that ``load_state_dict`` needs, as plain JSON values."""
        return {
            "epoch": self._epoch,
            "offset": self._offset,
            "num_items": self.num_items,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to where ``state`` was taken.

        Raises:
            ValueError: the state belongs to other data, another seed or another order, so that going on from it would
                repeat some rows and lose others.
        """
        for name, have in (("num_items", self.num_items), ("seed", self.seed), ("shuffle", self.shuffle)):
            if state[name] != have:
                raise ValueError(
                    f"the checkpoint was made with {name} {state[name]}, this run has {have}: resume with the data "
                    f"and the seed of the run that wrote it, or start anew without --ckpt.load_enable"
                )
        self.set_epoch(state["epoch"])
        self._offset = state["offset"]
