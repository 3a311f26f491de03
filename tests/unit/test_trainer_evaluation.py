"""What an evaluation says, which of them is the best, and what several reward models make together."""

from __future__ import annotations

import io
import json
import math
from collections import deque
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
import torch

from openrlhf.config import ConfigError
from openrlhf.data.trajectory import Segment, Trajectory
from openrlhf.rollout.actor import GroupRequest, Sampling
from openrlhf.tracking.progress import Console
from openrlhf.trainer.best import BestModel
from openrlhf.trainer.evaluation import EvalSettings, Evaluator, evaluation_metrics
from openrlhf.trainer.scoring import combine_scores


def answer(prompt: int, sample: int, score: float | None, source: str = "default", tokens: int = 2) -> Trajectory:
    segments = [] if score is None else [Segment(list(range(1 + tokens)), [(1, 1 + tokens)])]
    failure = "it hangs" if score is None else None
    return Trajectory(prompt, sample, "p", None, segments, score, failure, score, datasource=source)


def test_pass_rates_are_means_over_prompts_of_the_chance_to_draw_a_right_answer() -> None:
    scores = [[1, 0, 0, 0], [1, 1, 0, 1], [0, 0, 0, 0]]
    answers = [answer(p, s, float(score)) for p, row in enumerate(scores) for s, score in enumerate(row)]
    metrics = evaluation_metrics(answers, 4, with_pass_rates=True)
    for k in (1, 4):
        by_hand = [sum(max(draw) for draw in combinations(row, k)) / math.comb(4, k) for row in scores]
        assert metrics[f"eval/default_pass{k}"] == pytest.approx(sum(by_hand) / 3)
    assert metrics["eval/default_score"] == pytest.approx(4 / 12) and metrics["eval/default_failed"] == 0


def test_evaluation_counts_by_its_own_number_of_samples_and_a_single_one_gives_each_number_once() -> None:
    scores = [[1, 0, 0, 0], [0, 0, 0, 0]]
    answers = [answer(p, s, float(score)) for p, row in enumerate(scores) for s, score in enumerate(row)]
    metrics = evaluation_metrics(answers, 4, with_pass_rates=True)
    assert metrics["eval/default_pass1"] == 0.125 and metrics["eval/default_pass4"] == 0.5
    single = evaluation_metrics([answer(0, 0, 1.0), answer(1, 0, 0.0)], 1, with_pass_rates=True)
    assert {name: value for name, value in single.items() if "pass" in name} == {"eval/default_pass1": 0.5}


def test_each_datasource_has_its_own_numbers_and_a_failed_answer_is_not_a_wrong_one() -> None:
    answers = [answer(0, 0, 1.0, "a/b", tokens=3), answer(0, 1, None, "a/b"), answer(1, 0, 0.5), answer(1, 1, 0.0)]
    metrics = evaluation_metrics(answers, 2, with_pass_rates=True)
    assert metrics["eval/a_b_pass1"] == 1 and metrics["eval/a_b_failed"] == 1 and metrics["eval/a_b_length"] == 3
    # One answer is too few for pass@2.
    assert "eval/a_b_pass2" not in metrics
    assert metrics["eval/default_pass1"] == 0.25 and metrics["eval/default_pass2"] == 0.5


def test_scores_of_reward_models_are_no_pass_rates() -> None:
    metrics = evaluation_metrics([answer(0, 0, 3.5)], 1, with_pass_rates=False)
    assert metrics["eval/default_reward"] == 3.5 and not any("pass" in name for name in metrics)


@pytest.mark.parametrize("key", ["", "eval_default_pass1", "eval/default_pass1"])
def test_the_best_evaluation_is_the_last_of_the_highest(key: str, tmp_path: Path) -> None:
    best = BestModel(key, tmp_path)
    values = [0.1, 0.3, 0.3, 0.2]
    found = [best.improves(step, {"x": 9.0, "eval/default_pass1": value}) for step, value in enumerate(values)]
    assert found == [True, True, True, False]
    best.write()
    assert json.loads((tmp_path / "best.json").read_text()) == {"metric": "eval/default_pass1", "value": 0.3, "step": 2}
    again = BestModel(key, tmp_path)
    again.load_state_dict(best.state_dict())
    assert not again.improves(3, {"eval/default_pass1": 0.2}) and again.improves(4, {"eval/default_pass1": 0.4})


def test_of_the_checkpoints_the_one_that_was_evaluated_best_is_to_be_kept(tmp_path: Path) -> None:
    best = BestModel("", tmp_path)
    assert best.checkpoint_to_keep(1) is None
    kept = []
    # Steps 3 and 6 have an evaluation and no checkpoint, step 5 a checkpoint and no evaluation.
    for step, value in {2: 0.5, 3: 0.9, 4: 0.6, 5: None, 6: 0.8, 7: 0.6, 8: 0.1}.items():
        if value is not None:
            best.improves(step, {"eval/default_pass1": value})
        if step not in (3, 6):
            kept.append(best.checkpoint_to_keep(step))
            again = BestModel("", tmp_path)
            again.load_state_dict(best.state_dict())
            best = again
    assert kept == [2, 4, 4, 7, 7]
    none = BestModel("none", tmp_path)
    none.improves(2, {"eval/default_pass1": 0.5})
    assert none.checkpoint_to_keep(2) is None


def test_no_best_model_is_kept_where_none_is_asked_for_and_an_unknown_metric_is_named(tmp_path: Path) -> None:
    assert not BestModel("none", tmp_path).improves(1, {"eval/default_pass1": 1.0})
    assert not BestModel("", tmp_path).improves(1, {"eval/default_failed": 1.0})
    with pytest.raises(ConfigError, match="eval_math_pass1: .* it has eval/default_pass1"):
        BestModel("eval_math_pass1", tmp_path).improves(1, {"eval/default_pass1": 1.0})


def test_the_metric_is_settled_by_the_first_evaluation_and_one_without_it_is_passed_over(tmp_path: Path) -> None:
    best = BestModel("", tmp_path)
    assert best.improves(1, {"eval/a_pass1": 0.5, "eval/b_pass1": 0.1})
    # Nothing of a could be scored, and what b is worth says nothing about a.
    assert not best.improves(2, {"eval/b_pass1": 0.9}) and not best.improves(3, {"eval/a_pass1": math.nan})
    assert best.improves(4, {"eval/b_pass1": 0.0, "eval/a_pass1": 0.6})
    rewarded = BestModel("", tmp_path)
    assert rewarded.improves(1, {"eval/default_reward": -3.0}) and rewarded.improves(2, {"eval/default_reward": -2.0})


def test_several_reward_models_are_combined_as_asked() -> None:
    scores = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    assert combine_scores(scores, "sum").tolist() == [4, 2] and combine_scores(scores, "mean").tolist() == [2, 1]
    assert combine_scores(scores, "min").tolist() == [1, -2] and combine_scores(scores, "max").tolist() == [3, 4]


def test_sources_that_differ_in_white_space_and_slashes_alone_are_counted_together() -> None:
    answers = [answer(0, 0, 1.0, "a/b"), answer(1, 0, 0.0, "a_b"), answer(2, 0, 0.0, "a\nb")]
    metrics = evaluation_metrics(answers, 1, with_pass_rates=True)
    assert metrics["eval/a_b_pass1"] == pytest.approx(1 / 3)
    assert {name.rpartition("_")[0] for name in metrics} == {"eval/a_b"}


def test_an_evaluation_of_which_nothing_could_be_scored_does_not_blame_the_key(tmp_path: Path) -> None:
    best = BestModel("eval_default_pass1", tmp_path)
    assert not best.improves(0, {"eval/default_failed": 4.0}) and best.improves(1, {"eval/default_pass1": 0.1})


def test_reward_models_see_the_answers_in_the_order_of_the_prompts_however_groups_finish() -> None:
    class LastFirst:
        def stream(self, waiting: deque[GroupRequest]) -> Iterator[list[Trajectory]]:
            for request in reversed(waiting):
                yield [answer(request.group_id, sample, 0.0) for sample in range(request.num_samples)]

    seen: list[tuple[int, int]] = []
    settings = EvalSettings(2, Sampling(1.0, 1.0, max_new_tokens=4, seed=1, logprobs=False), with_pass_rates=False)
    evaluator = Evaluator(
        settings,
        ["p", "q", "r"],
        LastFirst(),
        Console(1, io.StringIO()),
        lambda scored: seen.extend((t.group_id, t.sample_id) for t in scored),
    )
    evaluator.run()
    assert seen == [(prompt, sample) for prompt in range(3) for sample in range(2)]
