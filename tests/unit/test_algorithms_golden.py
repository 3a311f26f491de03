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
)
from openrlhf.algorithms.aggregate import aggregate, count_units
from openrlhf.algorithms.kl import kl_loss, kl_per_token
from openrlhf.algorithms.policy_loss import ppo

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
TOLERANCE = {"rtol": 0, "atol": 1e-9}


def load(name):
    return json.loads((GOLDEN / f"rl_math_{name}.json").read_text())


def cases(what, count):
    """Every case named ``what`` in both files; ``count`` keeps a renamed case from being skipped unseen."""
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
    for estimate, name in ((leave_one_out, "rloo"), (group_baseline, "mean_baseline"), (group_norm, "group_norm")):
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
