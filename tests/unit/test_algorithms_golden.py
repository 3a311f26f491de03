"""The maths of RL against recorded values in float64."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from openrlhf.algorithms.advantages import (
    AdvantageInputs,
    compute_advantages,
    group_baseline,
    group_norm,
    leave_one_out,
    length_weighted_baseline,
)
from openrlhf.algorithms.aggregate import aggregate, count_units
from openrlhf.algorithms.evaluation import best_of_k
from openrlhf.algorithms.kl import adapt_kl_coef, kl_loss, kl_per_token
from openrlhf.algorithms.policy_loss import DEMANDED_AGGREGATION, PolicyLossInputs, policy_loss, ppo
from openrlhf.algorithms.rollout_correction import correction_weights
from openrlhf.algorithms.shaping import overlong_penalty, stop_properly
from openrlhf.algorithms.token_returns import generalized_advantages
from openrlhf.algorithms.value_loss import value_loss

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
TOLERANCE = {"rtol": 0, "atol": 1e-9}

# Losses of pairs, which have no place among the algorithms of RL.
OF_PREFERENCES = {"reward_model_loss", "preference_loss"}
TESTED: set[str] = set()


def load(name):
    return json.loads((GOLDEN / f"rl_math_{name}.json").read_text())


def cases(what, count):
    """Every case named ``what`` in both files; ``count`` keeps a renamed case from being skipped unseen."""
    TESTED.add(what)
    found = [
        pytest.param(load(n), case, id=f"{n}-{i}")
        for n in "ab"
        for i, case in enumerate(load(n)["cases"])
        if case["what"] == what
    ]
    assert len(found) == count
    return found


def grid(rows):
    return torch.tensor(rows, dtype=torch.float64)


class Packed:
    """A padded golden table as flat rows: trailing padding is cut, so that the rows are ragged."""

    def __init__(self, golden):
        mask = grid(golden["mask"]).bool()
        self.lengths = [int(row.nonzero().max()) + 1 for row in mask]
        self.mask = self.flat(mask)
        self.cu_seqlens = torch.tensor([0, *self.lengths]).cumsum(0).to(torch.int32)

    def flat(self, table):
        return torch.cat([row[:n] for row, n in zip(torch.as_tensor(table), self.lengths, strict=True)])


@pytest.mark.parametrize(("golden", "case"), cases("ppo", 14))
def test_ppo_loss_and_gradient_are_the_recorded_ones(golden, case):
    packed, args = Packed(golden), case["args"]
    logprobs = packed.flat(grid(golden["logprobs"])).requires_grad_()
    per_token, _ = ppo(
        logprobs,
        packed.flat(grid(golden["old_logprobs"])),
        packed.flat(grid(golden["advantages"])),
        packed.mask,
        args["clip_low"],
        args["clip_high"],
        args.get("dual_clip"),
    )
    mode = args["aggregation"].split()[0]
    total = count_units(packed.mask, packed.cu_seqlens, mode)
    constant = args.get("denominator_per_sequence", 1)
    loss = aggregate(per_token, packed.mask, packed.cu_seqlens, mode, int(total), constant)
    loss.backward()
    torch.testing.assert_close(loss.item(), case["loss"], **TOLERANCE)
    torch.testing.assert_close(logprobs.grad, packed.flat(grid(case["grad"])), **TOLERANCE)


@pytest.mark.parametrize(("golden", "case"), cases("kl_per_token", 6))
def test_kl_per_token_is_the_recorded_one(golden, case):
    packed = Packed(golden)
    kl = kl_per_token(
        packed.flat(grid(golden["logprobs"])),
        packed.flat(grid(golden["ref_logprobs"])),
        packed.mask,
        case["args"]["estimator"],
    )
    torch.testing.assert_close(kl, packed.flat(grid(case["value"])), **TOLERANCE)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_kl_loss_has_the_value_of_its_estimator(estimator):
    golden = load("a")
    packed = Packed(golden)
    inputs = (packed.flat(grid(golden["logprobs"])), packed.flat(grid(golden["ref_logprobs"])), packed.mask, estimator)
    torch.testing.assert_close(kl_loss(*inputs), kl_per_token(*inputs), rtol=0, atol=0)


@pytest.mark.parametrize(("golden", "case"), cases("group_advantage", 2))
def test_group_advantages_are_the_recorded_ones(golden, case):
    rewards = grid(case["inputs"]["rewards"])
    groups, samples = rewards.shape
    inputs = AdvantageInputs(
        rewards=rewards.flatten(),
        scored=torch.ones(groups * samples, dtype=torch.bool),
        group_ids=torch.arange(groups).repeat_interleave(samples),
        mask=torch.ones(groups * samples, dtype=torch.bool),
        cu_seqlens=torch.arange(groups * samples + 1),
    )
    estimates = {"rloo": leave_one_out, "mean_baseline": group_baseline, "group_norm": group_norm}
    for name, estimate in estimates.items():
        torch.testing.assert_close(estimate(inputs), grid(case[name]).flatten(), **TOLERANCE)


@pytest.mark.parametrize(("golden", "case"), cases("reinforce_plus_plus", 4))
def test_reinforce_plus_plus_is_the_recorded_one(golden, case):
    packed, args = Packed(golden), case["args"]
    kl = kl_per_token(
        packed.flat(grid(golden["logprobs"])), packed.flat(grid(golden["ref_logprobs"])), packed.mask, "k1"
    )
    rewards = grid(args["final_rewards"])
    inputs = AdvantageInputs(
        rewards=rewards,
        scored=torch.ones(len(rewards), dtype=torch.bool),
        group_ids=torch.arange(len(rewards)),
        mask=packed.mask,
        cu_seqlens=packed.cu_seqlens,
        kl=kl,
        kl_coef=args["kl_coef"],
        gamma=args["gamma"],
        reward_clip=(-10, 10),
    )
    advantages, returns = compute_advantages("reinforce", inputs)
    torch.testing.assert_close(returns, packed.flat(grid(case["returns"])), **TOLERANCE)
    torch.testing.assert_close(advantages, packed.flat(grid(case["advantages_whitened"])), **TOLERANCE)
    shifted, _ = compute_advantages("reinforce", replace(inputs, whiten_std=False))
    torch.testing.assert_close(shifted, packed.flat(grid(case["advantages_mean_only"])), **TOLERANCE)


@pytest.mark.parametrize(("golden", "case"), cases("group_advantage", 2))
def test_the_length_weighted_baseline_is_the_recorded_one(golden, case):
    rewards, lengths = grid(case["inputs"]["rewards"]), torch.tensor(case["inputs"]["lengths"]).long()
    groups, samples = rewards.shape
    total = int(lengths.sum())
    inputs = AdvantageInputs(
        rewards=rewards.flatten(),
        scored=torch.ones(groups * samples, dtype=torch.bool),
        group_ids=torch.arange(groups).repeat_interleave(samples),
        mask=torch.ones(total, dtype=torch.bool),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.long), lengths.flatten().cumsum(0)]),
    )
    torch.testing.assert_close(length_weighted_baseline(inputs), grid(case["opo"]).flatten(), **TOLERANCE)
    advantages, _ = compute_advantages("opo", inputs)
    expected = grid(case["opo"]).flatten().repeat_interleave(lengths.flatten())
    torch.testing.assert_close(advantages, expected, **TOLERANCE)


def total_of(per_token, packed, mode):
    units = count_units(packed.mask, packed.cu_seqlens, mode)
    return aggregate(per_token, packed.mask, packed.cu_seqlens, mode, int(units))


@pytest.mark.parametrize(
    ("golden", "case"), [*cases("gspo", 2), *cases("cispo", 2), *cases("sapo", 2), *cases("ppo_corrected", 12)]
)
def test_policy_losses_and_their_gradients_are_the_recorded_ones(golden, case):
    packed, args = Packed(golden), case["args"]
    name = "ppo" if case["what"] == "ppo_corrected" else case["what"]
    logprobs = packed.flat(grid(golden["logprobs"])).requires_grad_()
    old_logprobs = packed.flat(grid(golden["old_logprobs"]))
    inputs = PolicyLossInputs(
        logprobs,
        old_logprobs,
        packed.flat(grid(golden[args.get("advantages", "advantages")])),
        packed.mask,
        packed.cu_seqlens,
        args.get("clip_low", 0.2),
        args.get("clip_high", 0.2),
        cispo_ceiling=args.get("weight_ceiling"),
        sapo_tau_positive=args.get("tau_positive", 1.0),
        sapo_tau_negative=args.get("tau_negative", 1.0),
    )
    per_token, _ = policy_loss(name, inputs)
    if "correction" in args:
        weights, _ = correction_weights(
            args["correction"],
            old_logprobs,
            packed.flat(grid(golden["rollout_logprobs"])),
            packed.mask,
            packed.cu_seqlens,
            args["low"],
            args["high"],
        )
        torch.testing.assert_close(weights, packed.flat(grid(case["weights"])), **TOLERANCE)
        per_token = per_token * weights
    mode = DEMANDED_AGGREGATION[name] if name in DEMANDED_AGGREGATION else args["aggregation"]
    loss = total_of(per_token, packed, mode)
    loss.backward()
    torch.testing.assert_close(loss.item(), case["loss"], **TOLERANCE)
    torch.testing.assert_close(logprobs.grad, packed.flat(grid(case["grad"])), **TOLERANCE)


@pytest.mark.parametrize(("golden", "case"), cases("value_loss", 4))
def test_the_value_loss_and_its_gradient_are_the_recorded_ones(golden, case):
    packed, args = Packed(golden), case["args"]
    values = packed.flat(grid(golden["values"])).requires_grad_()
    old_values, returns = packed.flat(grid(golden["old_values"])), packed.flat(grid(golden["returns"]))
    per_token, _ = value_loss(values, old_values, returns, packed.mask, args["clip"])
    loss = total_of(per_token, packed, args["aggregation"])
    loss.backward()
    torch.testing.assert_close(loss.item(), case["loss"], **TOLERANCE)
    torch.testing.assert_close(values.grad, packed.flat(grid(case["grad"])), **TOLERANCE)


@pytest.mark.parametrize(("golden", "case"), cases("gae", 6))
def test_generalized_advantages_are_the_recorded_ones(golden, case):
    packed = Packed(golden)
    rewards, values = packed.flat(grid(case["inputs"]["rewards"])), packed.flat(grid(golden["values"]))
    advantages, returns = generalized_advantages(
        rewards, values, packed.mask, packed.cu_seqlens, case["args"]["gamma"], case["args"]["lambda"]
    )
    torch.testing.assert_close(advantages, packed.flat(grid(case["advantages"])), **TOLERANCE)
    torch.testing.assert_close(returns, packed.flat(grid(case["returns"])), **TOLERANCE)


@pytest.mark.parametrize(("golden", "case"), cases("gae_across_20_environment_tokens", 2))
def test_tokens_of_the_environment_do_not_weaken_the_first_advantage(golden, case):
    args = case["args"]
    # The recorded values are those of two turns of two tokens: the first of four is three lambdas from the reward.
    mask = torch.tensor([True, True, *[False] * 20, True, True])
    rewards, values = torch.zeros(24, dtype=torch.float64), torch.full((24,), args["value"], dtype=torch.float64)
    rewards[-1] = args["final_reward"]
    for lambd, expected in case["first_advantage_by_lambda"].items():
        advantages, _ = generalized_advantages(
            rewards, values, mask, torch.tensor([0, 24]), args["gamma"], float(lambd)
        )
        assert advantages[0].item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("golden", "case"), cases("adaptive_kl", 2))
def test_the_adaptive_coefficient_is_the_recorded_one(golden, case):
    args, coef = case["args"], case["args"]["init"]
    for kl, expected in zip(case["kl"], case["coef"], strict=True):
        coef = adapt_kl_coef(coef, kl, args["target"], args["n_steps"], args["horizon"])
        assert coef == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("golden", "case"), cases("overlong_penalty", 2))
def test_the_overlong_penalty_is_the_recorded_one(golden, case):
    args = case["args"]
    penalty = overlong_penalty(torch.tensor(case["lengths"]), args["max_new_tokens"], args["buffer"], args["factor"])
    torch.testing.assert_close(penalty, grid(case["penalty"]), **TOLERANCE)


@pytest.mark.parametrize(("golden", "case"), cases("stop_properly_penalty", 2))
def test_the_stop_properly_penalty_is_the_recorded_one(golden, case):
    for name, expected in case.items():
        if name.startswith("coef_"):
            rewards = stop_properly(grid(case["rewards"]), torch.tensor(case["truncated"]), float(name[5:]))
            torch.testing.assert_close(rewards, grid(expected), **TOLERANCE)


@pytest.mark.parametrize(("golden", "case"), cases("pass_at_k", 2))
def test_the_best_of_k_right_or_wrong_answers_is_the_recorded_pass_at_k(golden, case):
    n = case["args"]["n"]
    for correct, row in zip(case["correct"], case["value"], strict=True):
        for k, expected in zip(case["k"], row, strict=True):
            assert best_of_k([1.0] * correct + [0.0] * (n - correct), k) == pytest.approx(expected, abs=1e-9)


def test_no_recorded_case_is_left_out():
    recorded = {case["what"] for name in "ab" for case in load(name)["cases"]}
    assert recorded == TESTED | OF_PREFERENCES
