"""Log-probs of given tokens, and entropies, without ever holding the logits of a whole micro-batch.

The work is done inside the output head's own forward: that is the only place where its weight is whole under ZeRO-3.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import nn

# Logits that one matrix product makes, in the weight's dtype. Much fewer, and the backward would spend its time on
# adding up the gradient of the weight, chunk after chunk.
CHUNK_BYTES = 1 << 29
# Of those, what is turned into float32 at a time: 256 MB.
WIDE_ELEMENTS = 1 << 26


def _chunks(rows: int, vocab: int, elements: int) -> Iterator[slice]:
    size = max(1, elements // vocab)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """At least float32: bf16 rounds a log-prob by more than one update moves it."""
    return torch.promote_types(dtype, torch.float32)


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """The logits of the distribution that is sampled, divided before the softmax (dividing log-probs gives no
    distribution) and after the change to float32. At temperature 1 as they are: a softmax that is asked for float32
    reads bf16 without a copy.
    """
    return logits if temperature == 1.0 else logits.to(_wide(logits.dtype)) / temperature


def _reduce(logits: torch.Tensor, targets: torch.Tensor, request: ScoreRequest) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [n, V], targets [n] -> log-probs [n], entropies [n] or an empty tensor; differentiable."""
    log_softmax = _scaled(logits, request.temperature).log_softmax(dim=-1, dtype=_wide(logits.dtype))
    logprobs = log_softmax.gather(-1, targets[:, None]).squeeze(-1)
    if not request.entropy:
        return logprobs, logprobs.new_empty(0)
    if not log_softmax.requires_grad:
        return logprobs, torch.special.entr(log_softmax.exp_()).sum(-1)
    probabilities = log_softmax.exp()
    # A banned token has probability 0 and log-prob -inf; it adds nothing to the entropy.
    return logprobs, -torch.where(probabilities > 0, probabilities * log_softmax, 0.0).sum(-1)


def _kernels(hidden: torch.Tensor) -> ModuleType | None:
    """Returns: the kernels that take the logits in one pass, where they run; None where PyTorch's own do the work."""
    if not hidden.is_cuda or find_spec("triton") is None:
        return None
    from openrlhf.models import logit_kernels

    return logit_kernels if hidden.dtype in logit_kernels.DTYPES and logit_kernels.compiles(hidden.device) else None


class _HeadLogprobs(torch.autograd.Function):
    """Keeps hidden states alone; the backward computes each chunk's logits again."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, request: ScoreRequest):
        parts: list[tuple[torch.Tensor, ...]] = []
        kernels = _kernels(hidden)
        for chunk in request.chunks(hidden, weight):
            logits = nn.functional.linear(hidden[chunk], weight, bias)
            targets = request.targets[chunk]
            if kernels is not None:
                parts.append(kernels.row_statistics(logits, targets, request.temperature))
                continue
            for rows in _chunks(*logits.shape, request.wide_elements):
                parts.append(_reduce(logits[rows], targets[rows], request))
        logprobs, entropy, *normalisers = (torch.cat(column) for column in zip(*parts, strict=True))
        if not request.entropy:
            entropy = logprobs.new_empty(0)
        ctx.save_for_backward(hidden, weight, bias, entropy, *normalisers)
        ctx.request, ctx.kernels = request, kernels
        if not request.entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor):
        hidden, weight, bias, entropy, *normalisers = ctx.saved_tensors
        request: ScoreRequest = ctx.request
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = grad_bias = None
        for chunk in request.chunks(hidden, weight):
            grad = nn.functional.linear(hidden[chunk], weight, bias)
            targets = request.targets[chunk]
            # Gradients of the scaled logits, and so of the logits once they are divided as these were.
            upstream = grad_logprobs[chunk] / request.temperature
            spread = (grad_entropy[chunk] / request.temperature, entropy[chunk]) if request.entropy else None
            if ctx.kernels is not None:
                ctx.kernels.logits_to_gradient(
                    grad, targets, request.temperature, normalisers[0][chunk], upstream, spread
                )
            else:
                _to_gradient(grad, targets, request, upstream, spread)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[chunk])
            if need_weight:
                grad_weight = _with_product(grad_weight, grad, hidden[chunk], last=chunk.stop == hidden.shape[0])
            if bias is not None and need_bias:
                part = grad.sum(0, dtype=_wide(grad.dtype))
                grad_bias = part if grad_bias is None else grad_bias.add_(part)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
        )


def _to_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    request: ScoreRequest,
    upstream: torch.Tensor,
    spread: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """As ``logit_kernels.logits_to_gradient``, with PyTorch's operations, some rows at a time."""
    for rows in _chunks(*logits.shape, request.wide_elements):
        part = None if spread is None else (spread[0][rows], spread[1][rows])
        _rows_to_gradient(logits[rows], targets[rows, None], request.temperature, upstream[rows, None], part)


def _rows_to_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    upstream: torch.Tensor,
    spread: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """logits [n, V], targets and upstream [n, 1], spread [n] twice."""
    grad = _scaled(logits, temperature).softmax(dim=-1, dtype=_wide(logits.dtype))
    scale = -upstream
    if spread is None:
        at_target = grad.gather(-1, targets) * scale - scale
        torch.mul(grad, scale, out=logits)
    else:
        weight, entropy = (part[:, None] for part in spread)
        # -p log p is 0 for a banned token, of probability 0 and log-prob -inf.
        grad = torch.special.entr(grad).mul_(weight).addcmul_(grad, scale - weight * entropy)
        at_target = grad.gather(-1, targets) - scale
        logits.copy_(grad)
    logits.scatter_(-1, targets, at_target.to(logits.dtype))


def _with_product(total: torch.Tensor | None, grad: torch.Tensor, hidden: torch.Tensor, *, last: bool) -> torch.Tensor:
    """total [V, H] + grad [n, V]^T hidden [n, H]; added up in float32, since in bf16 every chunk would round what came
    before it. A single chunk adds nothing up.
    """
    wide = _wide(grad.dtype)
    if total is None and (last or grad.dtype == wide):
        return grad.t() @ hidden
    if grad.dtype == wide:
        return total.addmm_(grad.t(), hidden)
    if grad.device.type == "cuda":
        # The product itself comes out in float32, without a pass of its own over [V, H].
        if total is None:
            return torch.mm(grad.t(), hidden, out_dtype=wide)
        return torch.addmm(total, grad.t(), hidden, out_dtype=wide, out=total)
    product = grad.t() @ hidden
    return product.to(wide) if total is None else total.add_(product)


@dataclass(frozen=True)
class ScoreRequest:
    """What one forward wants from the output head.

    Attributes:
        positions: int64 [K], places in the flattened input whose next token is scored.
        targets: int64 [K], those next tokens.
        temperature: the logits are divided by it.
        entropy: entropies as well.
        chunk_elements: upper bound of the logits that exist at a time, in elements; None for what ``CHUNK_BYTES`` hold.
        wide_elements: the same for those that are float32.
    """

    positions: torch.Tensor
    targets: torch.Tensor
    temperature: float = 1.0
    entropy: bool = False
    chunk_elements: int | None = None
    wide_elements: int = WIDE_ELEMENTS

    def chunks(self, hidden: torch.Tensor, weight: torch.Tensor) -> Iterator[slice]:
        """Yields: rows of ``hidden`` [K, H] whose logits are made together by ``weight`` [V, H]."""
        elements = self.chunk_elements or CHUNK_BYTES // weight.element_size()
        return _chunks(hidden.shape[0], weight.shape[0], elements)


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
    for chunk in _chunks(*logits.shape, request.wide_elements):
        parts.append(_reduce(logits[chunk], request.targets[chunk], request))
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
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, self.request.positions)
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
