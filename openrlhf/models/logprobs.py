"""Log-probs of given tokens, and entropies, without ever holding the logits of a whole micro-batch.

The work is done inside the output head's own forward: that is the only place where its weight is whole under ZeRO-3.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# Logits of one chunk, in float32 elements: 256 MB, and two or three such tensors at a time in the backward.
CHUNK_ELEMENTS = 1 << 26


def _chunks(rows: int, vocab: int, chunk_elements: int) -> Iterator[slice]:
    size = max(1, chunk_elements // vocab)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """The logits of the distribution that is sampled: at least float32 before anything is subtracted (bf16 rounds a
    log-prob by more than one update moves it), divided before the softmax (dividing log-probs gives no distribution).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1.0 else logits / temperature


def _reduce(logits: torch.Tensor, targets: torch.Tensor, entropy: bool) -> tuple[torch.Tensor, ...]:
    """logits [n, V], targets [n] -> log normaliser [n], log-probs [n], entropies [n] or an empty tensor."""
    normaliser = logits.logsumexp(dim=-1)
    logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
    if not entropy:
        return normaliser, logprobs, logits.new_empty(0)
    log_softmax = logits - normaliser[:, None]
    probabilities = log_softmax.exp()
    # A banned token has probability 0 and log-prob -inf; it adds nothing to the entropy.
    return normaliser, logprobs, -torch.where(probabilities > 0, probabilities * log_softmax, 0.0).sum(-1)


class _HeadLogprobs(torch.autograd.Function):
    """Keeps hidden states and one number per token; the backward computes each chunk's logits again."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: ScoreRequest):
        rows, vocab = hidden.shape[0], weight.shape[0]
        parts = []
        for chunk in _chunks(rows, vocab, options.chunk_elements):
            logits = _scaled(nn.functional.linear(hidden[chunk], weight, bias), options.temperature)
            parts.append(_reduce(logits, options.targets[chunk], options.entropy))
        normaliser, logprobs, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, normaliser, entropy)
        ctx.options = options
        if not options.entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor):
        hidden, weight, bias, normaliser, entropy = ctx.saved_tensors
        options: ScoreRequest = ctx.options
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        # Summed over chunks in float32: added up in bf16, every chunk would round what came before it.
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and need_bias else None
        for chunk in _chunks(hidden.shape[0], weight.shape[0], options.chunk_elements):
            logits = _scaled(nn.functional.linear(hidden[chunk], weight, bias), options.temperature)
            log_softmax = (
                logits.sub_(normaliser[chunk, None]) if logits.dtype == wide else logits - normaliser[chunk, None]
            )
            grad = _logit_gradient(log_softmax, options, chunk, grad_logprobs, grad_entropy, entropy)
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[chunk]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
        )


def _logit_gradient(
    log_softmax: torch.Tensor,
    options: ScoreRequest,
    chunk: slice,
    grad_logprobs: torch.Tensor,
    grad_entropy: torch.Tensor,
    entropy: torch.Tensor,
) -> torch.Tensor:
    """d(log p_target) / dz_j = [j = target] - p_j, and d(entropy) / dz_j = -p_j (log p_j + entropy), z = logits / T."""
    probabilities = log_softmax.exp()
    upstream = grad_logprobs[chunk]
    grad = probabilities * -upstream[:, None]
    if options.entropy:
        inner = torch.where(probabilities > 0, probabilities * (log_softmax + entropy[chunk, None]), 0.0)
        grad -= inner * grad_entropy[chunk, None]
    grad.scatter_add_(-1, options.targets[chunk, None], upstream[:, None])
    return grad if options.temperature == 1.0 else grad / options.temperature


@dataclass(frozen=True)
class ScoreRequest:
    """What one forward wants from the output head.

    Attributes:
        positions: int64 [K], places in the flattened input whose next token is scored.
        targets: int64 [K], those next tokens.
        temperature: the logits are divided by it.
        entropy: entropies as well.
        chunk_elements: upper bound of a chunk's logits, in elements.
    """

    positions: torch.Tensor
    targets: torch.Tensor
    temperature: float = 1.0
    entropy: bool = False
    chunk_elements: int = CHUNK_ELEMENTS


def logprobs_from_hidden(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, request: ScoreRequest
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores ``request.targets`` from the hidden states [K, H] that predict them.

    Returns: log-probs [K] and entropies [K] (None where not asked for), float32 or wider.
    """
    logprobs, entropy = _HeadLogprobs.apply(hidden, weight, bias, request)
    return logprobs, (entropy if request.entropy else None)


def logprobs_from_logits(logits: torch.Tensor, request: ScoreRequest) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same from logits [K, V] that exist already, for models that change them after the head."""
    parts = []
    for chunk in _chunks(logits.shape[0], logits.shape[1], request.chunk_elements):
        scaled = _scaled(logits[chunk], request.temperature)
        parts.append(_reduce(scaled, request.targets[chunk], request.entropy)[1:])
    logprobs, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs, (entropy if request.entropy else None)


class ScoringHead:
    """Lets an output head answer a request instead of giving logits; without one it does what it always did."""

    def __init__(self, head: nn.Linear) -> None:
        self.head = head
        self.plain_forward = head.forward
        self.request: ScoreRequest | None = None
        self.probe: torch.Tensor | None = None
        head.forward = self.forward

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [..., H] -> logits [..., V], or [1, K, 1 or 2] (log-prob, entropy) while a request stands."""
        if self.request is None:
            return self.plain_forward(hidden)
        chosen = hidden.reshape(-1, hidden.shape[-1])[self.request.positions]
        logprobs, entropy = logprobs_from_hidden(chosen, self.head.weight, self.head.bias, self.request)
        answer = torch.stack([logprobs] if entropy is None else [logprobs, entropy], dim=-1)[None]
        return answer if self.probe is None else answer * 0 + self.probe.to(answer)

    @contextmanager
    def answering(self, request: ScoreRequest, probe: torch.Tensor | None = None) -> Iterator[None]:
        """While it lasts, a forward answers ``request``; with ``probe`` those very numbers [K, 1]."""
        self.request, self.probe = request, probe
        try:
            yield
        finally:
            self.request, self.probe = None, None


def scoring_head(model: Any) -> ScoringHead | None:
    """Finds the output head of a transformers model and makes it answer requests; made once, then found again.

    Returns: None where the head is not a plain linear layer (quantised, wrapped), whose inside we do not know.
    """
    head = model.get_output_embeddings()
    if head is None or type(head) is not nn.Linear:
        return None
    owner = getattr(head.forward, "__self__", None)
    return owner if isinstance(owner, ScoringHead) else ScoringHead(head)
