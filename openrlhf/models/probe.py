"""Finds out how a loaded model can be run without being silently wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from openrlhf.config.errors import ConfigError
from openrlhf.config.kernels import OURS
from openrlhf.data.packed_batch import PackedBatch, pack_rows
from openrlhf.models.forward import ForwardPlan, score_hidden, score_tokens, score_values, unwrap
from openrlhf.models.logprobs import ScoreRequest, scoring_head
from openrlhf.models.value_head import value_head

logger = logging.getLogger(__name__)

FIRST_ROW, SECOND_ROW = 7, 11

# A packed row may differ from the same row alone by rounding: other kernels, other orders of summation.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}

# A later token that moves earlier log-probs by this share of what an earlier token moves later ones by is seen by
# them. Both ways are alike in an encoder; what a causal model's experts round differently stays far below.
SEEN_SHARE = 0.1


def plan_forward(model: Any, *, packing_samples: bool, device: torch.device) -> ForwardPlan:
    """Runs two short rows and picks the fastest way of running this model that gives what the model itself gives.

    Collective where there is a process group: a verdict that is close goes against packing on all ranks alike.

    Args:
        model: a transformers model, or a DeepSpeed engine around one.
        packing_samples: False runs padded in any case.

    Raises: ConfigError for a model that answers with no numbers, or whose log-probs depend on later tokens.
    """
    module = unwrap(model)
    was_training = module.training
    module.eval()
    with torch.no_grad():
        _check_numbers(model, device)
        scalar = value_head(module) is not None
        if scalar:
            _check_scores(model, device)
        in_head = not scalar and _all_say(_head_answers_arrive(model, device), device)
        if not scalar and not in_head:
            _say("%s changes its logits after the output head; log-probs are taken from whole logits", _name(module))
        _check_causal(model, ForwardPlan(packed=False, in_head=in_head), device)
        packed = packing_samples and _all_say(
            _rows_stay_apart(model, ForwardPlan(packed=True, in_head=in_head), device), device
        )
        if packing_samples and not packed:
            _say("%s answers otherwise when rows are packed; every row is padded instead", _name(module))
    module.train(was_training)
    return ForwardPlan(packed=packed, in_head=in_head)


def _check_numbers(model: Any, device: torch.device) -> None:
    """Raises ConfigError, on all ranks alike, where a model answers with NaN or infinity."""
    module = unwrap(model)
    _, row = _rows(module, seed=0)
    answers = _answers(model, _batch([row], device), ForwardPlan(packed=False, in_head=False))
    if _all_say(bool(answers.isfinite().all()), device):
        return
    # Under ZeRO stage 3, this rank's part of each.
    parts = ((name, getattr(parameter, "ds_tensor", parameter)) for name, parameter in module.named_parameters())
    broken = [name for name, part in parts if part.is_floating_point() and not bool(part.isfinite().all())]
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        reason = f"{broken[0]}{more} of its weights hold some; take a model whose files are whole"
    else:
        reason = f"its weights are numbers, and overflow in {module.dtype}; take --ds.param_dtype bf16 or fp32"
    raise ConfigError(f"{module.name_or_path} ({_name(module)}) answers with values that are no numbers: {reason}")


def _all_say(verdict: bool, device: torch.device) -> bool:
    """Whether every rank found so. Ranks that run a model in different ways would wait for one another for ever."""
    if not dist.is_initialized():
        return verdict
    verdicts = torch.tensor(int(verdict), device=device)
    dist.all_reduce(verdicts, dist.ReduceOp.MIN)
    return bool(verdicts.item())


def _say(message: str, *args: Any) -> None:
    """Once, and not once for every rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(message, *args)


def _name(module: Any) -> str:
    return type(module).__name__


def _rows(module: Any, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows of tokens that every rank chooses alike; the second one does not depend on the seed."""
    vocab = module.config.get_text_config().vocab_size
    first = (torch.arange(FIRST_ROW) * 7919 + 31 * seed + 17) % vocab
    second = (torch.arange(SECOND_ROW) * 104729 + 11) % vocab
    return first, second


def _batch(rows: list[torch.Tensor], device: torch.device) -> PackedBatch:
    return pack_rows(rows, [torch.arange(row.numel()) > 0 for row in rows]).to(device)


def _head_answers_arrive(model: Any, device: torch.device) -> bool:
    """Whether what the head returns comes out of the model untouched (no soft-capping, no scale, no cast).

    The numbers are large on purpose: a random model's own logits are so small that soft-capping hardly moves them.
    """
    head = scoring_head(unwrap(model))
    if head is None:
        return False
    positions = torch.arange(8, device=device)
    expected = torch.linspace(-300.7, 300.9, 8, device=device)[:, None]
    request = ScoreRequest(positions=positions, targets=positions)
    tokens = (positions + 1)[None]
    with head.answering(request, probe=expected):
        answer = model(input_ids=tokens, use_cache=False).logits
    return answer.shape == (1, 8, 1) and torch.equal(answer[0].double(), expected.double())


@contextmanager
def _own_attention(module: Any) -> Iterator[None]:
    """Our kernels are causal whatever the model is, so an encoder shows what it is under its own attention alone."""
    chosen = module.config._attn_implementation
    if chosen not in OURS:
        yield
        return
    module.set_attn_implementation("eager")
    try:
        yield
    finally:
        module.set_attn_implementation(chosen)


def _check_causal(model: Any, plan: ForwardPlan, device: torch.device) -> None:
    """Changes the last token of a row, and the first, and compares what each moves.

    Raises: ConfigError, on all ranks alike.
    """
    module = unwrap(model)
    _, row = _rows(module, seed=0)
    vocab = module.config.get_text_config().vocab_size
    changed_last, changed_first = row.clone(), row.clone()
    changed_last[-1] = (row[-1] + vocab // 2) % vocab
    changed_first[0] = (row[0] + vocab // 2) % vocab
    with _own_attention(module):
        base, last, first = (
            _answers(model, _batch([tokens], device), plan) for tokens in (row, changed_last, changed_first)
        )
    backwards = (last - base)[:-1].abs().mean()
    # Without its direct successor, which a model that attends to nothing predicts from it too.
    forwards = (first - base)[2:].abs().mean()
    # A model with NaN for weights is no encoder: NaN is not above anything.
    if not _all_say(not bool(backwards > SEEN_SHARE * forwards), device):
        raise ConfigError(
            f"{module.name_or_path} ({_name(module)}) is no causal language model: a change of the last token of a row "
            f"moved the log-probs of the tokens before it by {backwards:.1e}, as a change of the first token moved "
            f"those behind it by {forwards:.1e}; take a decoder, since an encoder sees the answers that it is to learn."
        )


def _answers(model: Any, batch: PackedBatch, plan: ForwardPlan) -> torch.Tensor:
    """What a model says about every token: log-probs [T], or with a scalar head hidden states [T, H] of size 1, because
    a head's outputs may be of any size.
    """
    if value_head(unwrap(model)) is None:
        return score_tokens(model, batch, plan=plan).logprobs
    hidden = score_hidden(model, batch, plan)
    return hidden / hidden.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)


def _check_scores(model: Any, device: torch.device) -> None:
    """Raises ConfigError where the score of a row is not what the model's own class makes of it (it does something
    between the body and the head, or behind it): others who load an export would see other scores.
    """
    module = unwrap(model)
    row = _rows(module, seed=0)[0]
    row = row[row != module.config.get_text_config().pad_token_id]
    ours = score_values(model, _batch([row], device), ForwardPlan(packed=False))[-1]
    theirs = model(input_ids=row[None].to(device), use_cache=False).logits[0, 0].to(ours.dtype)
    same = bool((ours - theirs).abs() <= TOLERANCE[module.dtype] * theirs.abs().clamp(min=1e-3))
    if not _all_say(same, device):
        raise ConfigError(
            f"{_name(module)} gives a row the score {theirs.item():g} and its head alone {ours.item():g}: it changes "
            "scores around its head, which cannot be trained here; take another model"
        )


def _rows_stay_apart(model: Any, plan: ForwardPlan, device: torch.device) -> bool:
    """Whether the second of two packed rows neither sees the first one nor differs from itself alone."""
    module = unwrap(model)
    first, second = _rows(module, seed=0)
    other, _ = _rows(module, seed=1)
    together = _answers(model, _batch([first, second], device), plan)[FIRST_ROW:]
    beside_other = _answers(model, _batch([other, second], device), plan)[FIRST_ROW:]
    alone = _answers(model, _batch([second], device), plan)
    tolerance = TOLERANCE[module.dtype]
    # Same shapes and same kernels: without a leak only the routing of experts can move anything at all.
    leak = (together - beside_other).abs().max()
    # Positions counted on over the border, say. The mean, because in half precision single tokens scatter.
    shift = (together - alone).abs().mean()
    return bool(leak <= tolerance / 10) and bool(shift <= tolerance)
