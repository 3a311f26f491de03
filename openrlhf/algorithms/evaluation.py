"""Scores of an evaluation in which each prompt was sampled several times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is correct: 1 - C(n - c, k) / C(n, k).

    Source: arXiv 2107.03374, eq. 1. Computed in whole numbers and rounded once, so that nothing cancels or overflows.

    Args:
        samples: n, drawn for the prompt.
        correct: c, of them correct.
        k: 1 or more, at most n.

    Raises:
        ValueError: for a k outside 1 to n, or more correct samples than there are.
    """
    _check_k(samples, k)
    if not 0 <= correct <= samples:
        raise ValueError(f"{correct} correct of {samples} samples is not possible")
    return float(1 - Fraction(math.comb(samples - correct, k), math.comb(samples, k)))


def best_of_k(scores: Sequence[float], k: int) -> float:
    """Unbiased estimate of the highest of k scores, by the n that were drawn; for scores of 0 and 1 it is pass@k.

    sum over i of s_(i) C(i - 1, k - 1) / C(n, k), with s_(i) the i-th smallest: the chance that a draw of k out of n
    has it as its highest. k = 1 is the mean, k = n the maximum.

    Raises:
        ValueError: for a k outside 1 to n, or a score that is no finite number.
    """
    _check_k(len(scores), k)
    bad = [score for score in scores if not math.isfinite(score)]
    if bad:
        raise ValueError(f"a score of {bad[0]} cannot be ranked; leave the sample out and count it as failed")
    draws = math.comb(len(scores), k)
    return math.fsum(score * (math.comb(i, k - 1) / draws) for i, score in enumerate(sorted(scores)))


def mean_best_of_k(prompts: Sequence[Sequence[float]], ks: Iterable[int]) -> dict[int, float]:
    """The mean over prompts of ``best_of_k``, once for each different k.

    Args:
        prompts: for each prompt the scores of its samples.
        ks: that are asked for.

    Returns: by k; NaN without prompts.

    Raises:
        ValueError: as ``best_of_k``, with the prompt's place.
    """
    means = {}
    for k in ks:
        values = []
        for place, scores in enumerate(prompts):
            try:
                values.append(best_of_k(scores, k))
            except ValueError as error:
                raise ValueError(f"prompt {place}: {error}") from error
        means[k] = math.fsum(values) / len(values) if values else math.nan
    return means


def _check_k(samples: int, k: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"k = {k} of {samples} samples cannot be drawn; take a k from 1 to the samples of a prompt")
