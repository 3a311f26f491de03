"""PPO with a critic on recorded rollouts: a plain PyTorch loop, and the product's own parts.

The plain side knows no DeepSpeed, no packing, no micro-batches, no Ray, and none of the product's formulas.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, get_scheduler

from openrlhf.config import AlgoConfig, DeepSpeedConfig, KLConfig
from openrlhf.config.algo import AdvantageConfig
from openrlhf.data.trajectory import Trajectory
from openrlhf.models.value_head import HeadSpec
from openrlhf.trainer.experience import Budget, RewardShaping, add_advantages, build_experience, deal, denominator
from openrlhf.trainer.policy_update import PolicyLossSpec, StepShare, update_policy
from openrlhf.trainer.value_update import ValueLossSpec, update_critic
from tests.integration import rl_twin as twin

GAMMA, LAMBDA, KL_COEF, VALUE_CLIP = 0.97, 0.9, 0.05, 0.02
CRITIC = dataclasses.replace(twin.OPTIMIZER, adam=dataclasses.replace(twin.OPTIMIZER.adam, lr=3e-3), max_norm=0.1)


def _optimizer(model: Any, lr: float) -> tuple[Any, Any]:
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": twin.DECAY},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=twin.EPS)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=twin.UPDATES)
    return optimizer, scheduler


def token_values(model: Any, sample: Trajectory) -> torch.Tensor:
    """The critic's output one position before each sampled token."""
    ids = torch.tensor(sample.segments[0].tokens)
    outputs = model.score(model.model(ids[None]).last_hidden_state)[0, :, 0]
    places = [t for start, stop in sample.segments[0].action_ranges for t in range(start, stop)]
    return torch.stack([outputs[t - 1] for t in places])


def plain_gae(reward: float, kl: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """One sample, its own tokens only, from the last to the first."""
    rewards = [-KL_COEF * k for k in kl]
    rewards[-1] += max(-10.0, min(10.0, reward))
    advantages, following, next_value = [], 0.0, 0.0
    for r, value in zip(reversed(rewards), reversed(values), strict=True):
        following = r + GAMMA * next_value - value + GAMMA * LAMBDA * following
        next_value = value
        advantages.insert(0, following)
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def _whitened(samples: list[list[float]]) -> list[torch.Tensor]:
    flat = [value for sample in samples for value in sample]
    mean = sum(flat) / len(flat)
    std = max(sum((value - mean) ** 2 for value in flat) / len(flat), 1e-8) ** 0.5
    return [torch.tensor([(value - mean) / std for value in sample]) for sample in samples]


def _plain_rollout(
    step: int, samples: list[Trajectory], actor: Any, reference: Any, critic: Any
) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    with torch.no_grad():
        old = [twin.token_logprobs(actor, sample)[0] for sample in samples]
        ref = [twin.token_logprobs(reference, sample)[0] for sample in samples]
        values = [token_values(critic, sample) for sample in samples]
    both = [
        plain_gae(sample.reward, (o - r).tolist(), v.tolist())
        for sample, o, r, v in zip(samples, old, ref, values, strict=True)
    ]
    return old, values, _whitened([a for a, _ in both]), [torch.tensor(returns) for _, returns in both]


def plain_run(actor_folder: Path, critic_folder: Path) -> dict[str, Any]:
    """The whole run in plain PyTorch. Returns: losses and norms of each update of both models, and their weights."""
    actor, reference = (
        AutoModelForCausalLM.from_pretrained(actor_folder, dtype=torch.float32, attn_implementation="eager")
        for _ in range(2)
    )
    critic = AutoModelForSequenceClassification.from_pretrained(
        critic_folder, dtype=torch.float32, attn_implementation="eager"
    )
    parts = {
        "actor": (actor, *_optimizer(actor, twin.LR), twin.MAX_NORM),
        "critic": (critic, *_optimizer(critic, 3e-3), 0.1),
    }
    found: dict[str, Any] = {role: {"losses": [], "norms": []} for role in parts}
    for step, samples in enumerate(twin.record_rollouts()):
        old, values, advantages, returns = _plain_rollout(step, samples, actor, reference, critic)
        for chosen in twin.chosen_samples(step):
            policy, value = [], []
            for i in chosen:
                ratio = (twin.token_logprobs(actor, samples[i])[0] - old[i]).exp()
                bound = ratio.clamp(1 - twin.CLIP[0], 1 + twin.CLIP[1])
                policy.append(-torch.minimum(ratio * advantages[i], bound * advantages[i]))
                new = token_values(critic, samples[i])
                near = values[i] + (new - values[i]).clamp(-VALUE_CLIP, VALUE_CLIP)
                value.append(torch.maximum((new - returns[i]) ** 2, (near - returns[i]) ** 2) / 2)
            for role, losses in (("critic", value), ("actor", policy)):
                model, optimizer, scheduler, max_norm = parts[role]
                loss = torch.cat(losses).mean()
                loss.backward()
                found[role]["losses"].append(loss.item())
                found[role]["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    for role, (model, *_) in parts.items():
        found[role]["weights"] = {name: weight.detach() for name, weight in model.named_parameters()}
    return found


def product_run(actor_folder: Path, critic_folder: Path, stage: int, budget: Budget) -> dict[str, Any]:
    """The same run on this rank with the product's parts, as the controller puts them together."""
    from openrlhf.backends.deepspeed_backend import DeepSpeedBackend

    common = {"ds": DeepSpeedConfig(zero_stage=stage, param_dtype="fp32"), "device": "cpu", "keep_whole": 0}
    actor = DeepSpeedBackend.for_training(actor_folder, optimizer=twin.OPTIMIZER, total_steps=twin.UPDATES, **common)
    critic = DeepSpeedBackend.for_training(
        critic_folder, optimizer=CRITIC, total_steps=twin.UPDATES, head=HeadSpec(), **common
    )
    reference = DeepSpeedBackend.for_inference(actor_folder, **common)
    algo = AlgoConfig(
        advantage=AdvantageConfig(estimator="gae", gamma=GAMMA, lambd=LAMBDA), kl=KLConfig(init_coef=KL_COEF)
    )
    policy = PolicyLossSpec("ppo", *twin.CLIP, None, "token_mean", 16.0, None, twin.TEMPERATURE)
    value = ValueLossSpec(VALUE_CLIP, "token_mean", 16.0)
    found: dict[str, Any] = {role: {"losses": [], "norms": []} for role in ("actor", "critic")}
    for step, samples in enumerate(twin.record_rollouts()):
        experience = build_experience(samples)
        fields = experience.batch.token_fields
        with torch.no_grad():
            old = actor.forward(experience.batch, temperature=twin.TEMPERATURE).logprobs
            fields["ref_logprobs"] = reference.forward(experience.batch, temperature=twin.TEMPERATURE).logprobs
            fields["old_values"] = critic.values(experience.batch)
        fields["old_logprobs"] = old
        add_advantages(experience, algo, RewardShaping((-10.0, 10.0)), KL_COEF)
        for chosen in twin.chosen_samples(step):
            rows = experience.rows_of(chosen)
            shares, _ = deal(experience.batch, rows, actor.world_size, budget, pad_token_id=0)
            share = StepShare(shares[actor.rank], denominator(experience, rows, "token_mean"), KL_COEF)
            for role, backend, result in (
                ("critic", critic, update_critic(critic, share, value)),
                ("actor", actor, update_policy(actor, share, policy)),
            ):
                found[role]["losses"].append(backend.all_reduce(result.loss))
                found[role]["norms"].append(result.step.grad_norm)
                assert result.warning is None, result.warning
    for role, backend in (("actor", actor), ("critic", critic)):
        found[role]["weights"] = {name: w.detach().clone() for name, w in backend.named_full_parameters()}
    return found
