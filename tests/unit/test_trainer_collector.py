"""Which prompts a rollout draws and which of their samples it keeps, in whatever order groups finish."""

from __future__ import annotations

import io
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.algorithms.filtering import keep_groups
from openrlhf.config import RolloutConfig
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.sources import load_dataset_mix
from openrlhf.data.trajectory import Segment, Trajectory
from openrlhf.rollout.actor import GroupRequest
from openrlhf.tracking.progress import Console
from openrlhf.trainer.rl_metrics import StepMetrics
from openrlhf.trainer.sampling import Collected, RolloutCollector, SamplingSettings
from tests.unit.ragged_rows import f64

MAX_PROMPTS = 12
RANGE = (0.0, 1.0)
checked = settings(max_examples=150, deadline=None, derandomize=True)

# Scores of a group's samples, by the kind of group; None is a sample that failed.
KINDS: dict[str, list[float | None]] = {
    "mixed": [0.0, 1.0],
    "all right": [1.0, 1.0],
    "all wrong": [0.0, 0.0],
    "all half": [0.5, 0.5],
    "half failed": [1.0, None],
    "failed": [None, None],
}
TEACHES = {"mixed"}


class ScriptedPool:
    """Finishes groups in an order that a script picks, of those that an engine has at the time.

    Attributes:
        asked: all requests, in the order in which they were handed over.
    """

    def __init__(self, pick: Callable[[int], int], kind_of: Callable[[str], str], width: int = 4) -> None:
        """Args: ``pick``: which of so many running groups finishes next; ``width``: groups that run at once."""
        self._pick, self._kind_of, self._width = pick, kind_of, width
        self.asked: list[GroupRequest] = []

    def stream(self, waiting: deque[GroupRequest]) -> Iterator[list[Trajectory]]:
        running: list[GroupRequest] = []
        while waiting or running:
            while waiting and len(running) < self._width:
                running.append(waiting.popleft())
                self.asked.append(running[-1])
            request = running.pop(self._pick(len(running)))
            scores = [None] if request.probe else KINDS[self._kind_of(request.prompt.prompt)]
            yield [self._sample(request, index, score) for index, score in enumerate(scores)]

    def _sample(self, request: GroupRequest, index: int, score: float | None) -> Trajectory:
        # What an engine samples from a seeded request follows from prompt, group and place.
        tokens = [1, 2 + request.group_id % 7, 3 + index]
        failure = None if score is not None else "no verdict"
        return Trajectory(
            request.group_id, index, request.prompt.prompt, None, [Segment(tokens, [(1, 3)])], score, failure, score
        )


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], PromptDataset]:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps({"input": f"p{n}"}) + "\n" for n in range(MAX_PROMPTS)))
    rows = load_dataset_mix(str(path), None, split="train", max_samples=MAX_PROMPTS, seed=0)
    known = {count: PromptDataset(rows.take(count), tokenizer=None) for count in range(1, MAX_PROMPTS + 1)}
    return known.__getitem__


def collector_of(
    pool: Any,
    dataset: PromptDataset,
    *,
    batch: int,
    episodes: int = 1,
    bounds: tuple[float, float] | None = RANGE,
    output: io.StringIO | None = None,
) -> RolloutCollector:
    sampling = SamplingSettings(
        rollout=RolloutConfig(batch_size=batch, n_samples_per_prompt=2),
        num_episodes=episodes,
        seed=5,
        sample_seed=5,
        logprobs=False,
        filter_range=bounds,
    )
    return RolloutCollector(sampling, dataset, pool, Console(1, output or io.StringIO()))


@pytest.mark.parametrize(
    ("scores", "bounds", "told"),
    [
        ([0.0, 1.0], (0.0, 1.0), None),
        ([-1.0, 1.0], (0.0, 1.0), "scored a sample -1, and --algo.dynamic_filtering_range 0 1 compares"),
        ([0.0, 100.0], (0.2, 0.8), "scored a sample 100, and --algo.dynamic_filtering_range 0.2 0.8 compares"),
        ([-1.0, 1.0], (-1.0, 1.0), None),
        ([None, 0.5], (0.0, 1.0), None),
    ],
)
def test_scores_in_another_unit_than_the_filters_range_are_told_once(
    prompts: Any, monkeypatch: pytest.MonkeyPatch, scores: list[float | None], bounds: Any, told: str | None
) -> None:
    monkeypatch.setitem(KINDS, "odd", scores)
    output = io.StringIO()
    whole_run(collector_of(ScriptedPool(first, lambda text: "odd"), prompts(4), batch=2, bounds=bounds, output=output))
    lines = [line for line in output.getvalue().splitlines() if "dynamic_filtering_range" in line]
    assert len(lines) == (told is not None)
    assert told is None or told in lines[0]


def whole_run(collector: RolloutCollector) -> list[Collected]:
    steps = []
    while (collected := collector.collect()) is not None:
        steps.append(collected)
    return steps


def group_ids(samples: Sequence[Trajectory]) -> list[int]:
    return list(dict.fromkeys(sample.group_id for sample in samples))


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(1, MAX_PROMPTS))
    return {
        "count": count,
        "kinds": draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=count, max_size=count)),
        "batch": draw(st.integers(1, 5)),
        "episodes": draw(st.integers(1, 3)),
        "filtered": draw(st.booleans()),
    }


def play(run: dict[str, Any], prompts: Any, pick: Callable[[int], int], width: int = 4) -> tuple[Any, ScriptedPool]:
    pool = ScriptedPool(pick, lambda text: run["kinds"][int(text[1:])], width)
    collector = collector_of(
        pool,
        prompts(run["count"]),
        batch=run["batch"],
        episodes=run["episodes"],
        bounds=RANGE if run["filtered"] else None,
    )
    return whole_run(collector), pool


def first(_: int) -> int:
    return 0


@given(runs(), st.data())
@checked
def test_what_is_drawn_and_kept_does_not_depend_on_the_order_in_which_groups_finish(
    prompts: Any, run: dict[str, Any], data: st.DataObject
) -> None:
    expected, _ = play(run, prompts, first)
    width = data.draw(st.integers(1, 8))
    found, _ = play(run, prompts, lambda n: data.draw(st.integers(0, n - 1)), width)
    assert found == expected


@given(runs())
@checked
def test_every_prompt_is_drawn_once_an_episode_and_nothing_that_the_filter_accepts_is_lost(
    prompts: Any, run: dict[str, Any]
) -> None:
    steps, pool = play(run, prompts, first)
    asked = [request for request in pool.asked if not request.probe]
    everything = [f"p{n}" for n in range(run["count"])] * run["episodes"]
    assert sorted(request.prompt.prompt for request in asked) == sorted(everything)
    assert [request.group_id for request in asked] == list(range(len(asked)))
    kept = [group for step in steps for group in group_ids(step.trajectories)]
    # A group without any reward is a failure, which the filter has no say in.
    stays = (*TEACHES, "failed")
    staying = {r.group_id for r in asked if run["kinds"][int(r.prompt.prompt[1:])] in stays}
    assert sorted(kept) == (sorted(staying) if run["filtered"] else list(range(len(asked))))
    assert sum(len(step.all_samples()) for step in steps) == 2 * len(asked)
    # Nothing that stays lies in two steps, and each step but those at an end is full.
    assert len(set(kept)) == len(kept)
    sizes = [len(group_ids(step.trajectories)) for step in steps]
    assert all(size <= run["batch"] for size in sizes)
    if run["filtered"]:
        assert all(size == run["batch"] for size in sizes[:-1])


@given(runs())
@checked
def test_the_share_of_groups_that_pass_lies_between_0_and_1(prompts: Any, run: dict[str, Any]) -> None:
    steps, _ = play({**run, "filtered": True}, prompts, first)
    for step in steps:
        kept, dropped = (len(group_ids(part)) for part in (step.trajectories, step.dropped))
        metrics = StepMetrics()
        metrics.add_filter(kept, dropped)
        assert 0 <= metrics.values["filter/pass_rate"] <= 1
        assert metrics.values["filter/dropped_groups"] == dropped and kept + dropped > 0


@given(runs(), st.integers(0, 12), st.data())
@checked
def test_a_run_that_resumes_from_its_state_draws_what_the_one_that_was_not_stopped_draws(
    prompts: Any, run: dict[str, Any], stop: int, data: st.DataObject
) -> None:
    def fresh() -> RolloutCollector:
        pool = ScriptedPool(lambda n: data.draw(st.integers(0, n - 1)), lambda text: run["kinds"][int(text[1:])])
        return collector_of(
            pool,
            prompts(run["count"]),
            batch=run["batch"],
            episodes=run["episodes"],
            bounds=RANGE if run["filtered"] else None,
        )

    whole = whole_run(fresh())
    stopped = fresh()
    before = [collected for _ in range(stop) if (collected := stopped.collect()) is not None]
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = fresh()
    resumed.load_state_dict(state)
    assert before + whole_run(resumed) == whole


# --- cases by hand


def kinds_in_drawing_order(dataset: PromptDataset, kinds: Sequence[str], batch: int) -> Callable[[str], str]:
    """Gives the first prompt that is drawn the first kind, and so on."""
    pool = ScriptedPool(first, lambda _: "mixed", width=1)
    whole_run(collector_of(pool, dataset, batch=batch, bounds=None))
    drawn = [request.prompt.prompt for request in pool.asked if not request.probe]
    return dict(zip(drawn, kinds, strict=True)).__getitem__


def test_the_batch_that_comes_with_the_end_of_the_data_is_trained(prompts: Any) -> None:
    pool = ScriptedPool(first, lambda _: "mixed")
    steps = whole_run(collector_of(pool, prompts(5), batch=4, bounds=None))
    assert [len(group_ids(step.trajectories)) for step in steps] == [4, 1]
    # Data that has ended gives no step at all, not an empty one.
    assert collector_of(pool, prompts(1), batch=4).collect() is not None


def test_a_rejected_group_without_a_replacement_takes_no_accepted_one_with_it(prompts: Any) -> None:
    kind = kinds_in_drawing_order(prompts(3), ["mixed", "all right", "mixed"], 3)
    collector = collector_of(ScriptedPool(first, kind), prompts(3), batch=3)
    collected = collector.collect()
    assert group_ids(collected.trajectories) == [0, 2] and len(collected.trajectories) == 4
    assert group_ids(collected.dropped) == [1]
    assert collector.collect() is None


def test_each_dropped_group_is_replaced_by_the_next_prompt_and_by_one_alone(prompts: Any) -> None:
    kinds = ["all wrong", "mixed", "all half", "failed", "mixed", "half failed", "mixed", "mixed"]
    pool = ScriptedPool(first, kinds_in_drawing_order(prompts(8), kinds, 3))
    collector = collector_of(pool, prompts(8), batch=3)
    collected = collector.collect()
    # A judge that is down is no reason to draw one prompt after another.
    assert group_ids(collected.trajectories) == [1, 3, 4] and group_ids(collected.dropped) == [0, 2]
    # The other prompts wait for the next step.
    assert sum(not request.probe for request in pool.asked) == 5
    assert group_ids(collector.collect().trajectories) == [6, 7]


def test_scores_of_equal_worth_are_dropped_wherever_they_lie_in_the_range() -> None:
    groups = {"g0": [0.5] * 4, "g1": [0, 1, 0, 1], "g2": [1] * 4, "g3": [0.2, 0.4, 0.2, 0.4], "g4": [0] * 4}
    for name, scores in groups.items():
        ids = f64([0] * 4).long()
        keep, share = keep_groups(f64([float(s) for s in scores]), ids == 0, ids, 0.0, 1.0)
        assert keep.all() == keep.any() == (name in ("g1", "g3")) and share == float(name in ("g1", "g3"))


def test_probes_are_sampled_beside_the_first_prompts_and_never_trained_on(prompts: Any) -> None:
    pool = ScriptedPool(first, lambda _: "mixed")
    collected = collector_of(pool, prompts(12), batch=10).collect()
    assert len(collected.probes) == 8 and all(probe.group_id < 0 for probe in collected.probes)
    assert all(sample.group_id >= 0 for sample in collected.all_samples())
    probes = [request for request in pool.asked if request.probe]
    # Four groups run at once: when the fifth of ten ends, the ninth is the last that was asked for.
    assert [request.probe for request in pool.asked] == [False] * 8 + [True] * 8 + [False] * 2
    first_prompts = [(r.group_id, r.prompt.prompt) for r in pool.asked[:8]]
    assert [(-1 - r.group_id, r.prompt.prompt) for r in probes] == first_prompts
    assert all(r.sampling.top_p == 1 and r.sampling.logprobs and r.num_samples == 1 for r in probes)


def test_a_state_of_other_data_is_refused(prompts: Any, tmp_path: Path) -> None:
    pool = ScriptedPool(first, lambda _: "mixed")
    state = collector_of(pool, prompts(5), batch=2).state_dict()
    with pytest.raises(ValueError, match="num_items 5, this run has 6"):
        collector_of(pool, prompts(6), batch=2).load_state_dict(state)
