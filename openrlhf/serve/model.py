"""The model that is served: from text to token ids, from token ids to scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from openrlhf.config import ServeDeepSpeedConfig
from openrlhf.data.packed_batch import pack_rows
from openrlhf.data.templates import already_templated, control_tokens, encode
from openrlhf.data.text import broken_character
from openrlhf.models.forward import ForwardPlan, last_token_scores, score_values
from openrlhf.models.loading import DTYPES, check_context, load_causal_lm, load_tokenizer
from openrlhf.models.probe import plan_forward
from openrlhf.models.value_head import HeadSpec


class TextError(ValueError):
    """A text that cannot be scored; the message says why, without naming the text."""


def encode_query(tokenizer: Any, text: str) -> list[int]:
    """Tokenises prompt and response in one text, as the reward model's training does.

    What the chat template wrote, whole or cut, gets no special token. To other text the tokenizer adds its BOS, if it
    uses one and the text does not begin with it. Nothing is added at the end, where a response may have been cut off.
    """
    if not tokenizer.chat_template:
        return encode(tokenizer, text, templated=False)
    done = already_templated(tokenizer, text)
    if done is not None:
        return encode(tokenizer, text, templated=done.templated)
    # A prompt that lost its beginning is still known by the tokens that the template writes inside.
    marks = set(control_tokens(tokenizer).findall(text))
    marks -= {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
    return encode(tokenizer, text, templated=bool(marks))


@dataclass(frozen=True)
class RewardModel:
    """A loaded reward model with its tokenizer.

    Attributes:
        model: for sequence classification with one label.
        plan: how it is run without being silently wrong.
        max_len: tokens that a text may have.
        mean, std: what scores are normalised by.
    """

    model: Any
    tokenizer: Any
    plan: ForwardPlan
    device: torch.device
    max_len: int
    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        ds: ServeDeepSpeedConfig,
        device: str,
        max_len: int,
        normalize: bool = False,
        use_fast_tokenizer: bool = True,
        trust_remote_code: bool = False,
    ) -> RewardModel:
        """Loads a model as training and RL do.

        Args:
            device: "cuda" or "cpu".
            max_len: ``--data.max_len``.
            normalize: use the statistics that stand in the model's config.

        Raises:
            ConfigError: there is no such model, it has no scalar head, it cannot be run there, or it cannot place
                ``max_len`` tokens.
        """
        check_context(path, max_len, trust_remote_code=trust_remote_code)
        tokenizer = load_tokenizer(path, use_fast=use_fast_tokenizer, trust_remote_code=trust_remote_code)
        where = torch.device(device)
        model = load_causal_lm(
            path,
            dtype=DTYPES[ds.param_dtype],
            attn_implementation=ds.attn_implementation,
            experts_implementation=ds.experts_implementation,
            device=where,
            trust_remote_code=trust_remote_code,
            head=HeadSpec(prefix=ds.value_head_prefix, pad_token_id=tokenizer.pad_token_id),
        )
        model.requires_grad_(False).eval()
        plan = plan_forward(model, packing_samples=ds.packing_samples, device=where)
        mean, std = (model.config.mean, model.config.std) if normalize else (0.0, 1.0)
        return cls(model, tokenizer, plan, where, max_len, mean, std)

    @property
    def padded(self) -> bool:
        """Whether a forward pads its rows to the longest."""
        return not self.plan.packed

    def encode(self, text: str) -> list[int]:
        """Returns: the text's token ids, at least one.

        Raises: TextError where it is empty, too long, or holds what the model has no embedding for.
        """
        if not text.strip():
            raise TextError("is empty; a reward is that of a prompt with its response")
        broken = broken_character(text)
        if broken is not None:
            raise TextError(f"holds half of a surrogate pair ({broken}), which no tokenizer can take")
        ids = encode_query(self.tokenizer, text)
        if not ids:
            raise TextError("makes no token")
        if len(ids) > self.max_len:
            raise TextError(
                f"has {len(ids)} tokens, more than the {self.max_len} of --data.max_len, and the score of a part of it "
                "would be that of another text; send less, or start the server with more"
            )
        embeddings = self.model.get_input_embeddings().num_embeddings
        if max(ids) >= embeddings:
            raise TextError(f"holds token {max(ids)}, and the model has embeddings for {embeddings}")
        return ids

    @torch.no_grad()
    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Returns: the head's own output at the last token of each row, not normalised. One forward."""
        batch = pack_rows(rows, [torch.zeros(len(row), dtype=torch.bool) for row in rows]).to(self.device)
        return last_token_scores(score_values(self.model, batch, self.plan), batch.host.cu_seqlens).tolist()

    def release_memory(self) -> None:
        """Empties the allocator's cache: what a failed forward held there may not fit what the next one needs."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def normalized(self, score: float) -> float:
        """Returns: the score in deviations from the mean, by the statistics of this model; without them itself."""
        return (score - self.mean) / self.std
