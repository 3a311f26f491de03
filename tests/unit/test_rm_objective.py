"""The pieces of reward-model training that need no process group."""

from __future__ import annotations

import json
import statistics

import pytest
import torch

from openrlhf.config import RMModelConfig
from openrlhf.data.preference import PreferenceDataset, PreferenceFormat
from openrlhf.data.sources import load_dataset_mix
from openrlhf.data.streaming import StreamedRows
from openrlhf.trainer import rm
from openrlhf.trainer.rm import RewardObjective, record_statistics, reward_statistics
from openrlhf.trainer.streamed import StreamedObjective
from tests.tiny_models import PAD_ID, make_tokenizer

SETTINGS = RMModelConfig(margin_loss_enable=True)


class Embedded:
    """A rank whose score of a row is the sum of a learned number for each of its tokens."""

    rank, world_size, device = 0, 1, torch.device("cpu")

    def __init__(self) -> None:
        self.numbers = torch.randn(512, generator=torch.Generator().manual_seed(3)).requires_grad_()

    def row_scores(self, batch):
        scores = torch.zeros(batch.num_rows).index_add(0, batch.row_of_token(), self.numbers[batch.tokens])
        return scores / 10

    def all_reduce(self, value):
        return value

    def set_reward_statistics(self, mean, std):
        self.recorded = (mean, std)


@pytest.fixture
def data(tmp_path) -> PreferenceDataset:
    with (tmp_path / "a.jsonl").open("w") as file:
        for n in range(7):
            file.write(json.dumps({"q": f"{n} +", "chosen": "3 " * (n + 1), "rejected": "red", "margin": n / 7}) + "\n")
    rows = load_dataset_mix(str(tmp_path / "a.jsonl"), None, split="train", max_samples=99, seed=0)
    return PreferenceDataset(rows, make_tokenizer(), PreferenceFormat(prompt_key="q", margin=True), max_len=64)


def step(objective, parts):
    """Loss, metrics and gradient of a step that is dealt out in ``parts``."""
    backend, units = Embedded(), objective.units([item for part in parts for item in part])
    total, metrics = 0.0, {}
    for part in parts:
        loss, extra = objective.loss(backend, objective.pack(part), units)
        loss.backward()
        total += loss.item()
        metrics = {name: metrics.get(name, 0.0) + float(value) for name, value in extra.items()}
    return total, metrics, backend.numbers.grad


@pytest.mark.parametrize("kind", ["sigmoid", "logexp"])
def test_loss_metrics_and_gradient_do_not_depend_on_how_pairs_are_dealt_out(data, kind):
    objective = RewardObjective(data, RMModelConfig(loss_type=kind, margin_loss_enable=True), PAD_ID)
    whole = step(objective, [[0, 1, 2, 3, 4, 5, 6]])
    for parts in ([[6], [5], [4], [3], [2], [1], [0]], [[3, 0, 6], [], [5, 1, 2, 4]]):
        loss, metrics, gradient = step(objective, parts)
        assert loss == pytest.approx(whole[0], rel=1e-6) and metrics == pytest.approx(whole[1], rel=1e-6)
        torch.testing.assert_close(gradient, whole[2])


def test_a_batch_without_pairs_has_a_loss_of_zero_and_a_gradient_path(data):
    objective, backend = RewardObjective(data, SETTINGS, PAD_ID), Embedded()
    loss, metrics = objective.loss(backend, objective.pack([]), 3)
    loss.backward()
    assert loss == 0 and not backend.numbers.grad.any()
    assert all(float(value) == 0 for value in metrics.values())


def test_the_margin_counts_where_it_is_asked_for_and_only_there(data):
    with_margin, _, _ = step(RewardObjective(data, SETTINGS, PAD_ID), [[6, 5]])
    without, metrics, _ = step(RewardObjective(data, RMModelConfig(), PAD_ID), [[6, 5]])
    gaps = [float(gap) for gap in _gaps(data, [6, 5])]
    for found, margins in ((with_margin, (6 / 7, 5 / 7)), (without, (0, 0))):
        pairs = zip(gaps, margins, strict=True)
        wanted = statistics.mean(-torch.tensor(gap - least).sigmoid().log().item() for gap, least in pairs)
        assert found == pytest.approx(wanted, rel=1e-5)
    assert metrics["accuracy"] == sum(gap > 0 for gap in gaps) / 2
    assert metrics["reward_gap"] == pytest.approx(statistics.mean(gaps), rel=1e-5)
    assert metrics["reward_gap"] == pytest.approx(metrics["reward_chosen"] - metrics["reward_rejected"])


def _gaps(data, pairs):
    numbers = Embedded().numbers.detach()
    return [(numbers[data[i].chosen].sum() - numbers[data[i].rejected].sum()) / 10 for i in pairs]


@pytest.mark.parametrize("micro_batch_size", [1, 3, 64])
def test_statistics_are_mean_and_deviation_over_the_scores_of_both_rows(data, micro_batch_size):
    numbers = Embedded().numbers.detach()
    scores = [float(numbers[row].sum() / 10) for pair in data for row in (pair.chosen, pair.rejected)]
    objective = RewardObjective(data, SETTINGS, PAD_ID)
    mean, std, pairs = reward_statistics(Embedded(), objective, micro_batch_size)
    assert (mean, std) == pytest.approx((statistics.mean(scores), statistics.stdev(scores)), rel=1e-5)
    assert pairs == 7


def test_statistics_of_many_pairs_are_taken_evenly_over_the_data(data, monkeypatch):
    monkeypatch.setattr(rm, "STATISTICS_PAIRS", 3)
    numbers = Embedded().numbers.detach()
    taken = [data[i] for i in (0, 2, 4)]
    scores = [float(numbers[row].sum() / 10) for pair in taken for row in (pair.chosen, pair.rejected)]
    mean, _, pairs = reward_statistics(Embedded(), RewardObjective(data, SETTINGS, PAD_ID), 2)
    assert pairs == 3 and mean == pytest.approx(statistics.mean(scores), rel=1e-5)


def test_scores_that_are_all_equal_have_a_deviation_by_which_they_can_be_divided(data):
    backend = Embedded()
    backend.numbers = torch.zeros(512)
    assert reward_statistics(backend, RewardObjective(data, SETTINGS, PAD_ID), 2)[:2] == (0.0, 1.0)


def test_statistics_are_of_the_pairs_that_can_be_used_and_where_none_can_scores_stay_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(rm, "STATISTICS_PAIRS", 2)
    lines = [{"chosen": "3 yes", "rejected": f"3 {word}"} for word in ("yes", "no", "yes", "red")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = load_dataset_mix(str(tmp_path / "a.jsonl"), None, split="train", max_samples=99, seed=0)
    tokenizer = make_tokenizer()

    def streamed(order):
        data = StreamedRows(
            rows.select(order), lambda part: PreferenceDataset(part, tokenizer, PreferenceFormat(), max_len=64)
        )
        return StreamedObjective(data, lambda part: RewardObjective(part, RMModelConfig(), PAD_ID))

    # The first and the third of four are drawn, whose responses are the same.
    backend = Embedded()
    said = record_statistics(backend, streamed([0, 1, 2, 3]), 2, "training")
    assert backend.recorded == (0.0, 1.0)
    assert said.startswith("warning: of the training pairs that were drawn for the statistics of rewards none can be")

    said = record_statistics(backend, streamed([0, 2, 1, 3]), 2, "training")
    assert said.startswith("rewards of 1 training pairs: mean ") and backend.recorded[0] != 0.0
