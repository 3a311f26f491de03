"""The pieces of DPO that need no process group, on a real tiny model."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrlhf.config import DPOModelConfig
from openrlhf.data.batching import plan_micro_batches
from openrlhf.data.pair_packing import pack_mismatched
from openrlhf.data.preference import PreferenceDataset, PreferenceFormat
from openrlhf.data.sources import load_dataset_mix
from openrlhf.models.forward import ForwardPlan, score_tokens
from openrlhf.trainer.dpo import DPOObjective
from openrlhf.trainer.reference import ReferenceModel, as_row_field
from tests.tiny_models import PAD_ID, make_tiny_model, make_tokenizer

PAIRS = 5


@pytest.fixture
def data(tmp_path) -> PreferenceDataset:
    with (tmp_path / "a.jsonl").open("w") as file:
        for n in range(PAIRS):
            row = {"q": f"{n} +", "chosen": "3 " * (n + 1), "rejected": "one " * (PAIRS - n)}
            file.write(json.dumps(row) + "\n")
    rows = load_dataset_mix(str(tmp_path / "a.jsonl"), None, split="train", max_samples=99, seed=0)
    return PreferenceDataset(rows, make_tokenizer(), PreferenceFormat(prompt_key="q"), max_len=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


class OneProcess:
    """A model in this process, packed or padded, and who had it on the accelerator."""

    def __init__(self, folder, *, packed=True) -> None:
        self.module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        self.device = torch.device("cpu")
        self.plan = ForwardPlan(packed=packed)
        self.log: list[str] = []
        self.rank, self.world_size = 0, 1

    def all_reduce(self, value):
        return value

    def forward(self, batch, *, adapters=True):
        assert adapters, "it has none that could be off"
        self.log.append("forward")
        return score_tokens(self.module, batch, plan=self.plan)

    def reload(self):
        self.log.append("reload")

    def offload(self):
        self.log.append("offload")


def whole_step(backend, objective, *, micro_batch_size, ranks=1):
    """Loss, metrics and gradient of a step over all pairs, however they are dealt out."""
    backend.module.zero_grad()
    items = list(range(PAIRS))
    total, metrics = 0.0, {}
    for rank in plan_micro_batches(list(objective.lengths), ranks, micro_batch_size=micro_batch_size):
        for batch in objective.prepared(backend, items, map(objective.pack, rank)):
            loss, extra = objective.loss(backend, batch, objective.units(items))
            loss.backward()
            total += loss.item()
            metrics = {name: metrics.get(name, 0.0) + float(value) for name, value in extra.items()}
    return total, metrics, torch.cat([p.grad.flatten() for p in backend.module.parameters()])


def table_of(reference, data):
    whole = DPOObjective(data, DPOModelConfig(), PAD_ID).pack(range(PAIRS))
    return reference.sums(whole).view(-1, 2)


@pytest.mark.parametrize("loss", ["dpo", "ipo", "kto", "orpo", "simpo"])
def test_loss_and_gradient_do_not_depend_on_micro_batches_ranks_packing_or_how_the_reference_is_asked(
    data, folder, tmp_path, loss
):
    model = DPOModelConfig(loss_type=loss, beta=0.4, nll_loss_coef=0.3)
    backend = OneProcess(folder)
    reference = ReferenceModel(OneProcess(make_tiny_model(tmp_path / "reference", "qwen3", seed=7)))
    live = DPOObjective(data, model, PAD_ID, reference=reference)
    # What kto sets together differs from step to step, so nothing can be stored.
    table = table_of(reference, data)
    stored = live if loss == "kto" else DPOObjective(data, model, PAD_ID, table=table)
    expected, metrics, gradient = whole_step(backend, live, micro_batch_size=PAIRS)
    assert gradient.norm() > 1e-3
    for objective, other, micro, ranks in (
        (live, backend, 1, 1),
        (live, backend, 2, 3),
        (stored, backend, 2, 4),
        (live, OneProcess(folder, packed=False), 3, 2),
    ):
        found = whole_step(other, objective, micro_batch_size=micro, ranks=ranks)
        assert found[0] == pytest.approx(expected, rel=1e-6)
        assert found[1] == pytest.approx(metrics, rel=1e-9, abs=1e-12)
        assert torch.allclose(found[2], gradient, rtol=1e-6, atol=1e-9)


def test_a_reference_that_is_the_policy_gives_log_2_and_no_margin(data, folder):
    objective = DPOObjective(data, DPOModelConfig(), PAD_ID, reference=ReferenceModel(OneProcess(folder)))
    loss, metrics, _ = whole_step(OneProcess(folder), objective, micro_batch_size=2)
    assert loss == pytest.approx(math.log(2))
    assert metrics["reward_gap"] == pytest.approx(0.0, abs=1e-9)


def test_units_are_pairs_and_lengths_their_tokens(data):
    objective = DPOObjective(data, DPOModelConfig(), PAD_ID)
    batch = objective.pack([3, 1])
    assert objective.units([3, 1]) == 2 and batch.num_rows == 4
    assert objective.row_lengths([3, 1]) == batch.lengths.tolist()
    assert batch.lengths.view(-1, 2).sum(1).tolist() == [int(objective.lengths[item]) for item in (3, 1)]


def test_a_rank_without_pairs_has_the_metrics_of_the_others_a_loss_of_0_and_a_gradient_path(data, folder):
    backend = OneProcess(folder)
    table = torch.zeros(PAIRS, 2, dtype=torch.float64)
    for objective in (
        DPOObjective(data, DPOModelConfig(), PAD_ID, table=table),
        DPOObjective(data, DPOModelConfig(), PAD_ID, reference=ReferenceModel(backend)),
    ):
        empty, full = objective.prepared(backend, range(PAIRS), [objective.pack([]), objective.pack([0])])
        loss, metrics = objective.loss(backend, empty, PAIRS)
        loss.backward()
        assert loss.item() == 0 and all(float(value) == 0 for value in metrics.values())
        _, others = objective.loss(backend, full, PAIRS)
        assert metrics.keys() == others.keys()
    assert all(p.grad is not None and not p.grad.any() for p in backend.module.parameters())


def test_sums_of_the_reference_stand_at_the_rows_of_their_pairs(data):
    table = torch.arange(2.0 * PAIRS, dtype=torch.float64).view(PAIRS, 2)
    batch = DPOObjective(data, DPOModelConfig(), PAD_ID, table=table).pack([4, 0])
    assert batch.row_fields["ref_logprobs"].tolist() == [8.0, 9.0, 0.0, 1.0]
    assert as_row_field(table, []).shape == (1,)


def test_an_offloaded_reference_comes_and_goes_once_for_a_group_of_micro_batches(data, folder, monkeypatch):
    monkeypatch.setattr("openrlhf.trainer.dpo.GROUP", 2)
    backend = OneProcess(folder)
    objective = DPOObjective(data, DPOModelConfig(), PAD_ID, reference=ReferenceModel(backend, offload=True))
    batches = objective.prepared(backend, [0, 1, 2], map(objective.pack, ([0], [1, 2], [])))
    first = next(batches)
    assert backend.log == ["offload", "reload", "forward", "forward", "offload"]
    sums = [batch.row_fields["ref_logprobs"] for batch in (first, *batches)]
    assert backend.log[5:] == ["reload", "forward", "offload"]
    assert [len(each) for each in sums] == [2, 4, 1] and not any(each.requires_grad for each in sums)


def test_settings_of_ipo_say_whether_it_sums(data, folder):
    backend, table = OneProcess(folder), torch.full((PAIRS, 2), -5.0, dtype=torch.float64)
    found = {
        changes: whole_step(
            backend,
            DPOObjective(
                data, DPOModelConfig(ipo_enable=True, **dict([changes] if changes else [])), PAD_ID, table=table
            ),
            micro_batch_size=2,
        )[0]
        for changes in (None, ("ipo_sum_enable", True))
    }
    assert found[None] != pytest.approx(found["ipo_sum_enable", True])


def test_the_reference_point_of_kto_is_a_mean_over_responses_set_after_the_prompts_of_other_pairs(
    data, folder, tmp_path
):
    backend, other = OneProcess(folder), OneProcess(make_tiny_model(tmp_path / "reference", "qwen3", seed=7))
    objective = DPOObjective(data, DPOModelConfig(loss_type="kto"), PAD_ID, reference=ReferenceModel(other))
    items, expected = [3, 0, 4], []
    for here, there in ((3, 0), (0, 4), (4, 3)):
        record = data[here]
        prompt = [token for token, mask in zip(record.chosen, record.chosen_mask, strict=True) if not mask]
        for tokens, mask in (
            (data[there].chosen, data[there].chosen_mask),
            (data[there].rejected, data[there].rejected_mask),
        ):
            answer = [token for token, of_answer in zip(tokens, mask, strict=True) if of_answer]
            ids = torch.tensor([prompt + answer])
            with torch.no_grad():
                sums = [
                    each.module(ids)
                    .logits[0]
                    .log_softmax(-1)[:-1]
                    .gather(-1, ids[0, 1:, None])[len(prompt) - 1 :]
                    .sum()
                    for each in (backend, other)
                ]
            expected.append(float(sums[0] - sums[1]))
    assert objective.mismatched_ratios(backend, items).tolist() == pytest.approx(expected, rel=1e-6)
    point = max(0.0, sum(expected) / 6)
    (batch,) = objective.prepared(backend, items, [objective.pack(items)])
    assert batch.row_fields["reference_point"].tolist() == pytest.approx([point] * 6, rel=1e-6)
    shares = []
    for backend.rank in range(4):
        backend.world_size = 4
        shares += objective.mismatched_ratios(backend, items).tolist()
    assert sorted(shares) == pytest.approx(sorted(expected), rel=1e-6)


def test_a_single_pair_of_a_step_has_no_other_prompt_and_a_reference_point_of_0(data, folder):
    backend = OneProcess(folder)
    objective = DPOObjective(data, DPOModelConfig(loss_type="kto"), PAD_ID, reference=ReferenceModel(backend))
    (batch,) = objective.prepared(backend, [2], [objective.pack([2])])
    assert batch.row_fields["reference_point"].tolist() == [0.0, 0.0]


def test_rows_of_lent_responses_are_cut_at_the_length_that_rows_may_have(data):
    data.max_len = 6
    batch = pack_mismatched(data, [(0, 4), (4, 1)], PAD_ID)
    assert batch.num_rows == 4 and int(batch.lengths.max()) == 6
    prompts = [int((~mask).sum()) for mask in batch.action_mask.split(batch.lengths.tolist())]
    assert prompts[0] == prompts[1] and prompts[2] == prompts[3]
    assert pack_mismatched(data, [], PAD_ID).pad_rows == 1
