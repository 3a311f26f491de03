"""Which prompts are asked next, and what of the answers is kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from openrlhf.algorithms.filtering import keep_groups
from openrlhf.config import RolloutConfig
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.sampler import StatefulSampler
from openrlhf.data.trajectory import Trajectory
from openrlhf.rollout.actor import GroupRequest, Sampling
from openrlhf.rollout.pool import RolloutPool
from openrlhf.tracking.progress import Console

_PROBE_PROMPTS = 8
# They end after all other samples where those end together.
_PROBE_TOKENS = 16


@dataclass(frozen=True)
class SamplingSettings:
    """How a rollout is drawn.

    Attributes:
        num_episodes: passes over the prompts.
        seed: of the order of prompts.
        sample_seed: from which each sample's own follows; None lets the engines draw.
        logprobs: asks the engines for the log-probs of all samples.
        filter_range: exclusive bounds of a group's mean score; None keeps every group.
    """

    rollout: RolloutConfig
    num_episodes: int
    seed: int
    sample_seed: int | None
    logprobs: bool
    filter_range: tuple[float, float] | None


@dataclass
class Collected:
    """One rollout.

    Attributes:
        trajectories: of the groups that are kept, in the order in which their prompts were drawn.
        probes: samples for the comparison of log-probs, which nothing is trained on.
        dropped: of the groups that the filter took out.
    """

    trajectories: list[Trajectory] = field(default_factory=list)
    probes: list[Trajectory] = field(default_factory=list)
    dropped: list[Trajectory] = field(default_factory=list)

    def all_samples(self) -> list[Trajectory]:
        """Returns: what was sampled for training, kept or not."""
        return self.trajectories + self.dropped


class RolloutCollector:
    """Draws prompts, has them sampled, and says where in the data the run stands."""

    def __init__(self, settings: SamplingSettings, prompts: PromptDataset, pool: RolloutPool, console: Console) -> None:
        self._settings = settings
        self._prompts = prompts
        self._pool = pool
        self._console = console
        self._sampler = StatefulSampler(len(prompts), seed=settings.seed)
        self._told_of_scale = False
        # Prompts drawn so far; numbers the groups, and seeds their samples.
        self._groups = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns: where the run stands in its data."""
        return {"sampler": self._sampler.state_dict(), "groups": self._groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to where ``state`` was taken."""
        self._sampler.load_state_dict(state["sampler"])
        self._groups = state["groups"]

    def collect(self) -> Collected | None:
        """Samples one rollout; under a filter every group that it takes out is replaced by the next prompt.

        Never more groups are asked for than are still missing, so that nothing that the filter accepts is left over,
        and which prompts are drawn does not depend on the order in which groups finish.

        Returns: what was sampled, fewer groups than asked for at the end of the data; None where the data has ended.
        """
        indices = self._draw_batch()
        if not indices:
            return None
        collected = Collected()
        probes, requests = self._probes(indices), self._requests(indices)
        waiting, finished = deque(requests), 0
        total = len(indices) * self._settings.rollout.n_samples_per_prompt
        with self._console.phase("rollout", total=total, unit="samples") as bar:
            for group in self._pool.stream(waiting):
                finished += 1
                if finished == -(-len(requests) // 2):
                    # An engine that is asked for any log-prob works them out for all that it samples at that moment.
                    waiting.extendleft(reversed(probes))
                if not group or group[0].group_id < 0:
                    collected.probes += group
                elif self._keeps(group):
                    collected.trajectories += group
                    bar.update(len(group))
                else:
                    collected.dropped += group
                    waiting.extend(self._requests(self._draw(1)))
        # Groups arrive as they finish; a fixed order keeps a seeded run repeatable.
        for samples in (collected.trajectories, collected.probes, collected.dropped):
            samples.sort(key=lambda trajectory: (trajectory.group_id, trajectory.sample_id))
        return collected

    def _draw_batch(self) -> list[int]:
        size = self._settings.rollout.batch_size
        indices = self._draw(size)
        # Under a filter batches do not follow the episodes anyway, so a short one is filled up from the next.
        while self._settings.filter_range is not None and indices and len(indices) < size:
            more = self._draw(size - len(indices))
            if not more:
                break
            indices += more
        return indices

    def _draw(self, count: int) -> list[int]:
        """The next prompts of this episode, at most ``count``; those of the next one where it has ended."""
        indices = self._sampler.next_batch(count)
        if not indices and self._sampler.epoch + 1 < self._settings.num_episodes:
            self._sampler.set_epoch(self._sampler.epoch + 1)
            indices = self._sampler.next_batch(count)
        return indices

    def _keeps(self, group: Sequence[Trajectory]) -> bool:
        bounds = self._settings.filter_range
        # A group without any reward is a failure and not too easy or too hard: it is counted, and not replaced.
        if bounds is None or all(trajectory.reward is None for trajectory in group):
            return True
        self._tell_of_scale(group, bounds)
        scored = torch.tensor([t.reward is not None for t in group])
        scores = torch.tensor([_score(trajectory) for trajectory in group], dtype=torch.float64)
        kept, _ = keep_groups(scores, scored, torch.zeros(len(group), dtype=torch.long), *bounds)
        return bool(kept.any())

    def _tell_of_scale(self, group: Sequence[Trajectory], bounds: tuple[float, float]) -> None:
        """Scores in another unit than the filter's bounds make it take out what the user wants kept, without a word."""
        low, high = min(0.0, bounds[0]), max(1.0, bounds[1])
        odd = next((s for t in group if t.reward is not None and not low <= (s := _score(t)) <= high), None)
        if odd is None or self._told_of_scale:
            return
        self._told_of_scale = True
        self._console.warn(
            f"reward_func() or the agent scored a sample {odd:g}, and --algo.dynamic_filtering_range "
            f"{bounds[0]:g} {bounds[1]:g} compares the mean of such scores: return 'scores' from 0 to 1 beside the "
            "rewards (which count where there are none), or give the range in their unit."
        )

    def _probes(self, indices: Sequence[int]) -> list[GroupRequest]:
        """Requests for the prompts of the next ``_requests``; their numbers are those of its groups, below 0."""
        settings, rollout = self._settings, self._settings.rollout
        # The nucleus of top_p renormalises log-probs, so what is compared is sampled from all tokens.
        length = min(_PROBE_TOKENS, rollout.max_new_tokens or _PROBE_TOKENS)
        probing = Sampling(rollout.temperature, 1.0, length, settings.sample_seed, logprobs=True)
        return [
            GroupRequest(-1 - self._groups - place, self._prompts[index], 1, probing, probe=True)
            for place, index in enumerate(indices[:_PROBE_PROMPTS])
        ]

    def _requests(self, indices: Sequence[int]) -> list[GroupRequest]:
        settings, rollout = self._settings, self._settings.rollout
        first = self._groups
        self._groups += len(indices)
        sampling = Sampling(
            rollout.temperature, rollout.top_p, rollout.max_new_tokens, settings.sample_seed, settings.logprobs
        )
        return [
            GroupRequest(group, self._prompts[index], rollout.n_samples_per_prompt, sampling)
            for group, index in enumerate(indices, start=first)
        ]


def _score(trajectory: Trajectory) -> float:
    """NaN without a reward, which the filter does not look at."""
    if trajectory.reward is None:
        return float("nan")
    return trajectory.reward if trajectory.score is None else trajectory.score
