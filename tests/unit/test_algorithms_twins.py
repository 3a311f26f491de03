"""Every formula beside a slow loop that says the same thing plainly, on ragged rows of every kind."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.algorithms.advantages import ESTIMATORS, AdvantageInputs, compute_advantages
from openrlhf.algorithms.aggregate import aggregate, count_units
from openrlhf.algorithms.kl import kl_per_token
from openrlhf.algorithms.policy_loss import ppo
from tests.unit.ragged_rows import checked, numbers, of_each, per_row, ragged


@given(data=st.data())
@checked(150)
def test_aggregation_agrees_with_its_loop(data):
    lengths, rows, cu, mask = data.draw(ragged())
    loss = per_row(data.draw(numbers(sum(lengths))), lengths)
    chosen = [[x for x, m in zip(values, row, strict=True) if m] for values, row in zip(loss, rows, strict=True)]
    full = [values for values in chosen if values]
    expected = {
        "token_mean": sum(sum(v) for v in full) / sum(len(v) for v in full),
        "seq_mean": sum(sum(v) / len(v) for v in full) / len(full),
        "constant": sum(sum(v) for v in full) / (len(rows) * 17),
    }
    flat = torch.tensor([x for values in loss for x in values], dtype=torch.float64)
    for mode, value in expected.items():
        total = int(count_units(mask, cu, mode))
        assert aggregate(flat, mask, cu, mode, total, 17 if mode == "constant" else 1).item() == pytest.approx(value)


@given(data=st.data())
@pytest.mark.parametrize("dual_clip", [None, 1.1, 3.0])
@checked(120)
def test_ppo_agrees_with_its_loop(data, dual_clip):
    lengths, _, _, mask = data.draw(ragged())
    total = sum(lengths)
    new, old, adv = (data.draw(numbers(total)) for _ in range(3))
    new.requires_grad_()
    loss, stats = ppo(new, old, adv, mask, 0.2, 0.3, dual_clip)
    loss.sum().backward()
    kl = ratios = clipped = 0.0
    for i in range(total):
        if not mask[i]:
            assert loss[i] == 0 and new.grad[i] == 0
            continue
        ratio, a = math.exp(new[i].item() - old[i].item()), adv[i].item()
        objective = min(ratio * a, min(max(ratio, 0.8), 1.3) * a)
        live = objective == ratio * a
        if dual_clip is not None and a < 0 and objective < dual_clip * a:
            objective, live = dual_clip * a, False
        assert loss[i].item() == pytest.approx(-objective)
        assert new.grad[i].item() == pytest.approx(-ratio * a if live else 0.0)
        kl, ratios, clipped = kl + old[i].item() - new[i].item(), ratios + ratio, clipped + (not live)
    n = int(mask.sum())
    assert stats.means() == pytest.approx({"ppo_kl": kl / n, "ratio_mean": ratios / n, "clip_fraction": clipped / n})


@given(data=st.data())
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@checked(120)
def test_kl_agrees_with_its_loop(data, estimator):
    lengths, _, _, mask = data.draw(ragged())
    new, ref = (data.draw(numbers(sum(lengths), 9.0)) for _ in range(2))
    new.requires_grad_()
    kl = kl_per_token(new, ref, mask, estimator)
    kl.sum().backward()
    for i in range(sum(lengths)):
        d = new[i].item() - ref[i].item()
        value = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]
        slope = {"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d)}[estimator]
        inside = abs(value) <= 10
        assert kl[i].item() == pytest.approx(max(-10, min(10, value)) if mask[i] else 0.0)
        assert new.grad[i].item() == pytest.approx(slope if mask[i] and inside else 0.0)


def scalar_of(name, rewards, groups, scored, sizes, i):
    """What a trajectory is worth before KL and discount; ``sizes`` are the trained tokens of each."""
    members = [j for j in range(len(rewards)) if scored[j] and groups[j] == groups[i]]
    group = [rewards[j] for j in members]
    if name in ("gae", "reinforce"):
        return rewards[i]
    if len(set(group)) < 2:
        return 0.0
    mean = sum(group) / len(group)
    if name == "rloo":
        return rewards[i] - (sum(group) - rewards[i]) / (len(group) - 1)
    if name == "opo":
        return rewards[i] - sum(sizes[j] * rewards[j] for j in members) / max(1, sum(sizes[j] for j in members))
    if name == "group_norm":
        return (rewards[i] - mean) / (statistics.stdev(group) + 1e-9)
    return rewards[i] - mean


@given(data=st.data())
@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@checked(120)
def test_advantages_agree_with_their_loop(data, name):
    lengths, rows, cu, mask = data.draw(ragged())
    gamma, whiten_std = data.draw(st.sampled_from([1.0, 0.9])), data.draw(st.booleans())
    n = len(lengths)
    rewards = data.draw(of_each(n, st.sampled_from([0.0, 0.25, 0.7, 3.0])))
    groups = data.draw(of_each(n, st.sampled_from([0, 10, 20])))
    scored = data.draw(of_each(n, st.booleans()))
    kl, values = data.draw(numbers(sum(lengths), 0.6)), data.draw(numbers(sum(lengths)))
    inputs = AdvantageInputs(
        rewards=torch.tensor([r if s else math.nan for r, s in zip(rewards, scored, strict=True)], dtype=torch.float64),
        scored=torch.tensor(scored),
        group_ids=torch.tensor(groups),
        mask=mask,
        cu_seqlens=cu,
        kl=kl,
        kl_coef=0.2,
        gamma=gamma,
        reward_clip=(-0.6, 0.6),
        whiten_std=whiten_std,
        values=torch.where(mask, values, math.nan),
        lambd=0.8,
    )
    advantages, returns = compute_advantages(name, inputs)

    sizes = [sum(row) for row in rows]
    expected, expected_returns = [], []
    for i, (row, kls, vs) in enumerate(zip(rows, per_row(kl, lengths), per_row(values, lengths), strict=True)):
        after = next_value = 0.0
        out, back = [None] * len(row), [0.0] * len(row)
        last = max((t for t, m in enumerate(row) if m), default=None)
        for t in reversed(range(len(row))):
            if row[t] and scored[i]:
                worth = max(-0.6, min(0.6, scalar_of(name, rewards, groups, scored, sizes, i)))
                reward = (worth if t == last else 0.0) - 0.2 * kls[t]
                if name == "gae":
                    after = reward + gamma * next_value - vs[t] + gamma * 0.8 * after
                    next_value = vs[t]
                else:
                    after = reward + gamma * after
                out[t], back[t] = after, after + next_value
        expected, expected_returns = expected + out, expected_returns + back
    known = [x for x in expected if x is not None]
    assert returns.tolist() == pytest.approx(expected_returns)
    shift, scale = 0.0, 1.0
    if known and name in ("gae", "reinforce", "reinforce_baseline"):
        shift = sum(known) / len(known)
        variance = sum((x - shift) ** 2 for x in known) / len(known)
        scale = math.sqrt(max(variance, 1e-8)) if whiten_std else 1.0
    assert advantages.tolist() == pytest.approx([0.0 if x is None else (x - shift) / scale for x in expected])
