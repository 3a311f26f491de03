"""One forward over a packed batch: log-probs, entropies and values aligned to the tokens. Every shift by one stands
here.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from openrlhf.data.packed_batch import PackedBatch, moved
from openrlhf.models.attention import packing_arguments
from openrlhf.models.logprobs import ScoreRequest, logprobs_from_logits, scoring_head
from openrlhf.models.scores import TokenScores
from openrlhf.models.value_head import value_head


@dataclass(frozen=True)
class ForwardPlan:
    """How a model is run. ``models.probe.plan_forward`` finds out what is right for it.

    Attributes:
        packed: rows end to end; otherwise each row is padded to the longest.
        in_head: log-probs are computed inside the output head; otherwise from the model's whole logits.
    """

    packed: bool = True
    in_head: bool = True


def unwrap(model: Any) -> Any:
    """Returns: the transformers model inside a DeepSpeed engine, or the model itself."""
    return model.module if hasattr(model, "module") else model


def _model_inputs(module: Any, batch: PackedBatch, packed: bool) -> tuple[dict[str, Any], torch.Tensor]:
    """Returns: what the model is called with, on the batch's device, and int64 [T] in host memory: where each token
    stands in the flattened input.
    """
    inputs, flat = _packed_inputs(module, batch) if packed else _padded_inputs(batch)
    return {**inputs, **batch.model_inputs}, flat


def _packed_inputs(module: Any, batch: PackedBatch) -> tuple[dict[str, Any], torch.Tensor]:
    positions = batch.position_ids
    inputs = {
        "input_ids": batch.tokens[None],
        "position_ids": positions[None] if positions.dim() == 1 else positions[:, None],
        **packing_arguments(module.config._attn_implementation, batch.cu_seqlens, batch.host.lengths.tolist()),
    }
    return inputs, torch.arange(batch.tokens.numel())


def _padded_inputs(batch: PackedBatch) -> tuple[dict[str, Any], torch.Tensor]:
    """Pads on the right: there neither attention nor a recurrent state of an earlier token can see the padding, and
    positions count real tokens only.
    """
    host, device = batch.host, batch.tokens.device
    rows, longest = host.num_rows, int(host.lengths.max())
    row = host.row_of_token()
    flat = row * longest + torch.arange(host.tokens.numel()) - host.cu_seqlens.long()[row]
    mask = torch.zeros(rows * longest, dtype=torch.long).index_fill(0, flat, 1).view(rows, longest)
    ids = torch.zeros(rows * longest, dtype=torch.long).index_copy(0, flat, host.tokens)
    positions = torch.zeros(*host.position_ids.shape[:-1], rows * longest, dtype=torch.long)
    positions[..., flat] = host.position_ids
    inputs = {
        "input_ids": ids.view(rows, longest),
        "attention_mask": mask,
        "position_ids": positions.unflatten(-1, (rows, longest)),
    }
    return {name: moved(tensor, device) for name, tensor in inputs.items()}, flat


def _accepted(module: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Leaves out what the model's forward has no name for (a state-space model knows no positions)."""
    parameters = inspect.signature(module.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return inputs
    return {name: value for name, value in inputs.items() if name in parameters}


def score_tokens(
    model: Any,
    batch: PackedBatch,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    plan: ForwardPlan = ForwardPlan(),
) -> TokenScores:
    """Scores the tokens whose ``action_mask`` is 1.

    Args:
        model: a transformers model for causal language modelling, or a DeepSpeed engine around one.
        batch: on the model's device.
        temperature: the one that the tokens were sampled with.
        entropy: also the entropy of the distribution that each of them was drawn from.

    Returns: log-probs (and entropies) of all T tokens, 0 where nothing is trained, with a gradient path even then.
    """
    module, host, device = unwrap(model), batch.host, batch.tokens.device
    inputs, flat = _model_inputs(module, batch, plan.packed)
    trained = host.action_mask.nonzero().flatten()
    # With nothing trained, one token is scored all the same and then left out: every rank has to run every layer.
    scored = trained if trained.numel() else torch.zeros(1, dtype=torch.long)
    request = ScoreRequest(
        positions=moved(flat[(scored - 1).clamp(min=0)], device),
        targets=moved(host.tokens[scored], device),
        temperature=temperature,
        entropy=entropy,
    )
    logprobs, entropies = _run(model, module, inputs, request, plan.in_head)
    places = moved(scored, device)
    return TokenScores(
        logprobs=_spread(logprobs, places, batch.action_mask),
        entropy=None if entropies is None else _spread(entropies, places, batch.action_mask),
    )


def score_values(model: Any, batch: PackedBatch, plan: ForwardPlan = ForwardPlan()) -> torch.Tensor:
    """Runs a model with a scalar head.

    Args:
        model: what ``load_causal_lm`` gave for a ``HeadSpec``, or a DeepSpeed engine around it.
        batch: on the model's device.

    Returns: [T], the head's output at every token, computed in the weights' dtype and given as float32 or wider.
    """
    return _head_outputs(model, batch, plan, hidden=False).squeeze(-1)


def score_hidden(model: Any, batch: PackedBatch, plan: ForwardPlan = ForwardPlan()) -> torch.Tensor:
    """Returns: [T, H], what the scalar head reads; otherwise as ``score_values``."""
    return _head_outputs(model, batch, plan, hidden=True)


def _head_outputs(model: Any, batch: PackedBatch, plan: ForwardPlan, *, hidden: bool) -> torch.Tensor:
    module = unwrap(model)
    head = value_head(module)
    if head is None:
        raise TypeError(f"{type(module).__name__} was loaded without a scalar head")
    inputs, flat = _model_inputs(module, batch, plan.packed)
    with head.answering(hidden=hidden):
        out = model(**_accepted(module.base_model, {**inputs, "use_cache": False}))
    return out.flatten(0, 1).index_select(0, moved(flat, out.device)).to(torch.promote_types(out.dtype, torch.float32))


def state_values(raw: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Values of the states in which tokens were chosen: that before token t is judged by the output at t - 1.

    Args:
        raw: [T], the head's outputs.
        cu_seqlens: int [N + 1].

    Returns: [T], 0 at the first token of each row, before which nothing stands.
    """
    # One place more than tokens: a last row without any token starts there.
    first = torch.zeros(raw.numel() + 1, dtype=torch.bool, device=raw.device)
    first.index_fill_(0, cu_seqlens[:-1].long(), True)
    return torch.where(first[:-1], 0.0, raw.roll(1))


def last_token_scores(raw: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Scores of whole rows: the output at the last token of each, trailing pad rows included.

    Args:
        raw: [T], the head's outputs.
        cu_seqlens: int [N + 1], in host memory, where it is checked without waiting for a GPU; every row has a token
            at least.

    Returns: [N].
    """
    if bool((cu_seqlens.diff() <= 0).any()):
        raise ValueError("a row without any token has no score")
    return raw.index_select(0, moved(cu_seqlens[1:].long() - 1, raw.device))


def _run(
    model: Any, module: Any, inputs: dict[str, Any], request: ScoreRequest, in_head: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    inputs = _accepted(module, {**inputs, "use_cache": False})
    if not in_head:
        logits = model(**inputs).logits
        return logprobs_from_logits(logits.reshape(-1, logits.shape[-1])[request.positions], request)
    with scoring_head(module).answering(request):
        answer = model(**inputs).logits[0]
    return answer[:, 0], (answer[:, 1] if request.entropy else None)


def _spread(values: torch.Tensor, places: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[K] -> [T], 0 elsewhere. ``where`` also keeps out whatever stands at a place that only filled up."""
    spread = torch.zeros(mask.shape, dtype=values.dtype, device=values.device).scatter(0, places, values)
    return torch.where(mask, spread, 0.0)
