"""Evaluation during RL: answers to held-out prompts, and how many of them are right."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from openrlhf.algorithms.evaluation import mean_best_of_k
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.trajectory import Trajectory
from openrlhf.rollout.actor import GroupRequest, Sampling
from openrlhf.rollout.pool import RolloutPool
from openrlhf.tracking.progress import Console


@dataclass(frozen=True)
class EvalSettings:
    """How evaluation samples.

    Attributes:
        samples: answers to each prompt.
        with_pass_rates: scores say how right an answer is, from 0 to 1; not so with reward models.
    """

    samples: int
    sampling: Sampling
    with_pass_rates: bool


class Evaluator:
    """Samples the evaluation prompts with the engines as they stand."""

    def __init__(
        self,
        settings: EvalSettings,
        prompts: PromptDataset,
        pool: RolloutPool,
        console: Console,
        add_scores: Callable[[Sequence[Trajectory]], None],
    ) -> None:
        """
        Args:
            add_scores: fills in rewards that agents do not give.
        """
        self._settings = settings
        self._prompts = prompts
        self._pool = pool
        self._console = console
        self._add_scores = add_scores

    def run(self) -> dict[str, float]:
        """Returns: metrics by name, each for every ``datasource`` of the prompts."""
        settings = self._settings
        requests = deque(
            GroupRequest(index, self._prompts[index], settings.samples, settings.sampling)
            for index in range(len(self._prompts))
        )
        trajectories: list[Trajectory] = []
        with self._console.phase("evaluation", total=len(requests) * settings.samples, unit="samples") as bar:
            for group in self._pool.stream(requests):
                trajectories += group
                bar.update(len(group))
        # Groups finish in any order, and which rows share a forward of a reward model shows in the last bits of scores.
        trajectories.sort(key=lambda trajectory: trajectory.group_id)
        self._add_scores(trajectories)
        return evaluation_metrics(trajectories, settings.samples, with_pass_rates=settings.with_pass_rates)


def evaluation_metrics(trajectories: Sequence[Trajectory], samples: int, *, with_pass_rates: bool) -> dict[str, float]:
    """Sums up an evaluation.

    pass@k is the unbiased estimate of the best score among k answers (for scores of 0 and 1: arXiv 2107.03374, eq. 1),
    averaged over prompts; an answer that could not be scored is neither right nor wrong, so its prompt counts with the
    answers that it has, and not at all in a pass@k that these are too few for.

    Returns: ``eval/<datasource>_pass1``, ``..._pass<samples>``, ``..._score``, ``..._reward``, ``..._length`` (tokens
        of the policy), ``..._truncated`` (share), ``..._failed`` (samples).
    """
    by_source: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        # Trackers read "/" as a folder; sources that differ in such characters alone are counted together.
        by_source[re.sub(r"[\s/]+", "_", trajectory.datasource)].append(trajectory)
    metrics: dict[str, float] = {}
    for source, members in sorted(by_source.items()):
        scored = [t for t in members if t.reward is not None]
        sampled = [t for t in members if t.segments]
        values = {
            "reward": [t.reward for t in scored],
            "score": [t.score for t in scored],
            "length": [float(t.response_length) for t in sampled],
            "truncated": [float(t.truncated) for t in sampled],
        }
        if with_pass_rates:
            groups: dict[int, list[float]] = defaultdict(list)
            for trajectory in scored:
                groups[trajectory.group_id].append(trajectory.score)
            for k in sorted({1, samples}):
                enough = [scores for scores in groups.values() if len(scores) >= k]
                values[f"pass{k}"] = list(mean_best_of_k(enough, [k]).values()) if enough else []
        metrics |= {f"eval/{source}_{key}": sum(v) / len(v) for key, v in values.items() if v}
        metrics[f"eval/{source}_failed"] = float(len(members) - len(scored))
    return metrics
