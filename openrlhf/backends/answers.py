"""What a model of a backend says about micro-batches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from openrlhf.data.packed_batch import PackedBatch
from openrlhf.models.adapters import adapters_off
from openrlhf.models.forward import ForwardPlan, last_token_scores, score_tokens, score_values, state_values
from openrlhf.models.scores import TokenScores


class Answers:
    """The part of a backend that only runs the model.

    Attributes:
        model: what is called; ``module`` is the transformers model inside.
        plan: how it is run.
    """

    model: Any
    module: Any
    device: torch.device
    plan: ForwardPlan
    _trainable: bool

    def forward(
        self, batch: PackedBatch, *, temperature: float = 1.0, entropy: bool = False, adapters: bool = True
    ) -> TokenScores:
        """Scores one micro-batch; keeps a gradient where gradients are enabled.

        Args:
            batch: on any device.
            temperature: the one that the tokens were sampled with.
            entropy: also the entropy of each trained token's distribution.
            adapters: False asks the model that it was before it was given adapters.
        """
        self._set_mode()
        with nullcontext() if adapters else adapters_off(self.module):
            return score_tokens(
                self.model, batch.to(self.device), temperature=temperature, entropy=entropy, plan=self.plan
            )

    def _set_mode(self) -> None:
        train = torch.is_grad_enabled() and self._trainable
        if self.module.training != train:
            self.model.train(train)

    def values(self, batch: PackedBatch) -> torch.Tensor:
        """Values of states, of a model with a scalar head; keeps a gradient where gradients are enabled.

        Args:
            batch: on any device.

        Returns: float32 [T]: at t the value of the state before token t; 0 at the first token of each row.
        """
        self._set_mode()
        batch = batch.to(self.device)
        return state_values(score_values(self.model, batch, self.plan), batch.cu_seqlens)

    def row_scores(self, batch: PackedBatch) -> torch.Tensor:
        """Scores of rows, of a model with a scalar head; keeps a gradient where gradients are enabled.

        Returns: float32 [N], the head's own output at the last token of each row: not normalised by the statistics in
            ``config``. Pad rows have one as well.
        """
        self._set_mode()
        batch = batch.to(self.device)
        return last_token_scores(score_values(self.model, batch, self.plan), batch.host.cu_seqlens)
