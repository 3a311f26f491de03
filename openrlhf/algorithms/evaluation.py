"""Scores of an evaluation in which each prompt was sampled several times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def best_of_k(scores: Sequence[float], k: int) -> float:
    """Unbiased estimate of the highest of k scores, by the n that were drawn.

    sum over i of s_(i) C(i - 1, k - 1) / C(n, k), with s_(i) the i-th smallest: the chance that a draw of k out of n
    has it as its highest. k = 1 is the mean, k = n the maximum. For scores of 0 and 1, c of them 1, it is pass@k:
    1 - C(n - c, k) / C(n, k) (arXiv 2107.03374, eq. 1).

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
