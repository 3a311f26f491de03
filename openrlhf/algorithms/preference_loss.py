"""Losses of pairs of responses to one prompt, of which the first is preferred."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from openrlhf.algorithms.aggregate import mask_out, sum_by_row
from openrlhf.algorithms.registry import look_up, register


@dataclass(frozen=True)
class PairInputs:
    """All that a preference loss may look at: P pairs, log-probs summed over the tokens of each response.

    Attributes:
        chosen: [P], of the policy that is trained; this and ``rejected`` are the only inputs that get a gradient.
        rejected: [P].
        ref_chosen: [P], of the reference model; None for a loss of ``REFERENCE_FREE``.
        ref_rejected: [P].
        chosen_tokens: [P], tokens of the responses; an empty one counts as if it had one.
        rejected_tokens: [P].
        beta: above 0; strength of the pull towards the reference (``dpo``, ``ipo``, ``kto``), scale of the reward
            (``simpo``) or weight of the odds ratio (``orpo``).
        label_smoothing: of ``dpo`` and ``simpo``, at least 0 and below 0.5: the probability that a label is wrong.
        ipo_sum: ``ipo`` over sums of log-probs instead of their means over tokens.
        simpo_gamma: target of the margin of ``simpo``.
        reference_point: z0 of ``kto``, from ``kto_reference_point``; at least 0.
        desirable_weight: of ``kto``, for the chosen responses.
        undesirable_weight: the same for the rejected ones.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    ref_chosen: torch.Tensor | None
    ref_rejected: torch.Tensor | None
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor
    beta: float
    label_smoothing: float = 0.0
    ipo_sum: bool = False
    simpo_gamma: float = 0.0
    reference_point: float | torch.Tensor | None = None
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


@dataclass(frozen=True)
class PairLosses:
    """What a preference loss gives for P pairs.

    Attributes:
        loss: [P]; the loss of an optimizer step is the mean over its pairs, over all ranks and micro-batches.
        chosen_rewards: [P], without a gradient: the reward that the policy implies for the response, in the form that
            the loss compares.
        rejected_rewards: [P].
    """

    loss: torch.Tensor
    chosen_rewards: torch.Tensor
    rejected_rewards: torch.Tensor


PreferenceLoss = Callable[[PairInputs], PairLosses]

PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {}

REFERENCE_FREE = ("orpo", "simpo")
SMOOTHED_LOSSES = ("dpo", "simpo")


def register_preference_loss(name: str) -> Callable[[PreferenceLoss], PreferenceLoss]:
    """Enters the decorated function into ``PREFERENCE_LOSSES``.

    Raises:
        ValueError: where the name is taken.
    """
    return register(PREFERENCE_LOSSES, "preference loss", name)


def preference_loss(name: str, inputs: PairInputs) -> PairLosses:
    """The loss ``name`` of each pair.

    Raises:
        ValueError: for an unknown name, a parameter that the loss does not allow, or log-probs of the reference that
            are missing.
    """
    loss = look_up(PREFERENCE_LOSSES, "preference loss", name)
    if not inputs.beta > 0:
        raise ValueError(f"beta must be above 0, got {inputs.beta}")
    smoothing = inputs.label_smoothing
    if not 0 <= smoothing < 0.5:
        raise ValueError(f"label smoothing must be at least 0 and below 0.5, got {smoothing}")
    if smoothing and name not in SMOOTHED_LOSSES:
        raise ValueError(f"the preference loss {name} has no label smoothing; use {' or '.join(SMOOTHED_LOSSES)}")
    if name not in REFERENCE_FREE and (inputs.ref_chosen is None or inputs.ref_rejected is None):
        raise ValueError(f"the preference loss {name} needs the log-probs of a reference model")
    return loss(inputs)


@register_preference_loss("dpo")
def dpo(inputs: PairInputs) -> PairLosses:
    """DPO: -(1 - e) log sigmoid(h) - e log sigmoid(-h), h = beta [(chosen - ref) - (rejected - ref)].

    Source: arXiv 2305.18290, eq. 7; with a smoothing e above 0 conservative DPO (E. Mitchell, "A note on DPO with noisy
    preferences and relationship to IPO", 2023, eq. 3).
    """
    chosen, rejected = (inputs.beta * ratio for ratio in _log_ratios(inputs))
    return _compared(_smoothed(chosen - rejected, inputs.label_smoothing), chosen, rejected)


@register_preference_loss("ipo")
def ipo(inputs: PairInputs) -> PairLosses:
    """IPO (arXiv 2310.12036, eq. 17): (d - 1 / (2 beta))^2, d the difference of the log-ratios to the reference.

    Log-ratios are means over the tokens of their response, as the authors use them (huggingface/trl pull request 1265),
    so that the target does not depend on lengths; ``ipo_sum`` takes the sums of the paper's formula.
    """
    chosen, rejected = _log_ratios(inputs)
    if not inputs.ipo_sum:
        chosen = _per_token(chosen, inputs.chosen_tokens)
        rejected = _per_token(rejected, inputs.rejected_tokens)
    loss = (chosen - rejected - 1 / (2 * inputs.beta)).square()
    return _compared(loss, inputs.beta * chosen, inputs.beta * rejected)


@register_preference_loss("kto")
def kto(inputs: PairInputs) -> PairLosses:
    """KTO (arXiv 2402.01306, eq. 8), each pair one desirable and one undesirable example.

    Half of w_d (1 - sigmoid(beta (r_chosen - z0))) + w_u (1 - sigmoid(beta (z0 - r_rejected))), r the log-ratio to the
    reference. z0 is a number for the whole optimizer step, without a gradient.

    Raises:
        ValueError: without ``reference_point``.
    """
    if inputs.reference_point is None:
        raise ValueError("the preference loss kto needs a reference point, which kto_reference_point estimates")
    chosen, rejected = _log_ratios(inputs)
    point = torch.as_tensor(inputs.reference_point, dtype=chosen.dtype, device=chosen.device).detach()
    desirable = torch.sigmoid(inputs.beta * (point - chosen))
    undesirable = torch.sigmoid(inputs.beta * (rejected - point))
    loss = (inputs.desirable_weight * desirable + inputs.undesirable_weight * undesirable) / 2
    return _compared(loss, inputs.beta * chosen, inputs.beta * rejected)


def kto_reference_point(log_ratio_sum: torch.Tensor, count: float) -> torch.Tensor:
    """z0 of ``kto``: how far the policy is from the reference, from responses to other prompts (arXiv 2402.01306, 4.1).

    Args:
        log_ratio_sum: scalar, over the whole optimizer step: policy minus reference log-probs of responses set after
            prompts that they do not belong to.
        count: how many of them there are, above 0.

    Returns: scalar, at least 0 and without a gradient.
    """
    if not count > 0:
        raise ValueError(f"a reference point needs at least one response, got {count}")
    return (log_ratio_sum.detach() / count).clamp(min=0)


@register_preference_loss("orpo")
def orpo(inputs: PairInputs) -> PairLosses:
    """ORPO (arXiv 2403.07691, eqs. 6 and 7): -l_chosen - beta log sigmoid(log odds(chosen) - log odds(rejected)).

    l is the mean log-prob of a response over its tokens and odds = p / (1 - p) with p = exp(l). There is no reference.
    """
    chosen, rejected = _means(inputs)
    loss = -chosen - inputs.beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    return _compared(loss, inputs.beta * chosen, inputs.beta * rejected)


@register_preference_loss("simpo")
def simpo(inputs: PairInputs) -> PairLosses:
    """SimPO (arXiv 2405.14734, eq. 6): -log sigmoid(beta (l_chosen - l_rejected) - gamma), smoothed as ``dpo``.

    l is the mean log-prob of a response over its tokens. There is no reference.
    """
    chosen, rejected = (inputs.beta * mean for mean in _means(inputs))
    return _compared(_smoothed(chosen - rejected - inputs.simpo_gamma, inputs.label_smoothing), chosen, rejected)


def chosen_nll(inputs: PairInputs) -> torch.Tensor:
    """Returns: [P], the mean negative log-likelihood per token of the chosen response (arXiv 2404.19733, eq. 2)."""
    return -_per_token(inputs.chosen, inputs.chosen_tokens)


def response_sums(
    logprobs: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """From tokens to responses.

    Args:
        logprobs: [T].
        mask: bool [T], 1 at the tokens of responses; what stands elsewhere has no effect.
        cu_seqlens: [N + 1].

    Returns: float64 [N], log-probs summed over each row's response, and int64 [N], its tokens.
    """
    # Losses look at differences of such sums, which float32 would round to 1e-5 for a response of some hundred tokens.
    return sum_by_row(mask_out(logprobs, mask).double(), cu_seqlens), sum_by_row(mask.long(), cu_seqlens)


def pair_metrics(losses: PairLosses, nll: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Args: ``nll``: [P], from ``chosen_nll``.

    Returns: by name, [P] without gradients, whose means over a step's pairs are its metrics. ``accuracy`` counts pairs
        whose chosen response has the higher reward; equal ones do not count.
    """
    margin = losses.chosen_rewards - losses.rejected_rewards
    return {
        "accuracy": (margin > 0).to(margin.dtype),
        "reward_chosen": losses.chosen_rewards,
        "reward_rejected": losses.rejected_rewards,
        "reward_gap": margin,
        "nll": nll.detach(),
    }


def _log_ratios(inputs: PairInputs) -> tuple[torch.Tensor, torch.Tensor]:
    return inputs.chosen - inputs.ref_chosen.detach(), inputs.rejected - inputs.ref_rejected.detach()


def _means(inputs: PairInputs) -> tuple[torch.Tensor, torch.Tensor]:
    return _per_token(inputs.chosen, inputs.chosen_tokens), _per_token(inputs.rejected, inputs.rejected_tokens)


def _per_token(sums: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return sums / tokens.clamp(min=1).to(sums.dtype)


def _smoothed(margin: torch.Tensor, smoothing: float) -> torch.Tensor:
    loss = -(1 - smoothing) * logsigmoid(margin)
    # Left out where it weighs nothing: 0 times an infinite loss would be NaN.
    return loss - smoothing * logsigmoid(-margin) if smoothing else loss


def _log_odds(logprob: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)) for p = exp(logprob), accurate at both ends; p is kept one rounding step below 1.

    Source: M. Maechler, "Accurately computing log(1 - exp(-|a|))", 2012, eq. 7.
    """
    logprob = logprob.clamp(max=-torch.finfo(logprob.dtype).eps)
    likely = logprob > -math.log(2)
    # Each branch sees only what it can hold: the gradient of one that overflows would be NaN in both.
    near = torch.log(-torch.expm1(torch.where(likely, logprob, torch.full_like(logprob, -1.0))))
    far = torch.log1p(-torch.exp(torch.where(likely, torch.full_like(logprob, -1.0), logprob)))
    return logprob - torch.where(likely, near, far)


def _compared(loss: torch.Tensor, chosen: torch.Tensor, rejected: torch.Tensor) -> PairLosses:
    return PairLosses(loss, chosen.detach(), rejected.detach())
