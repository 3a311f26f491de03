"""One RL run on recorded rollouts, twice: a plain PyTorch loop that anyone can check, and the product's own parts.

The plain side knows no DeepSpeed, no packing, no micro-batches, no Ray, and none of the product's formulas.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, get_scheduler

from openrlhf.config import AdamConfig, AlgoConfig, DeepSpeedConfig, KLConfig, OptimizerConfig
from openrlhf.config.algo import AdvantageConfig
from openrlhf.data.batching import split_updates
from openrlhf.data.trajectory import Segment, Trajectory
from openrlhf.trainer.experience import Budget, RewardShaping, add_advantages, build_experience, deal, denominator
from openrlhf.trainer.policy_update import PolicyLossSpec, StepShare, update_policy
from openrlhf.trainer.rl_metrics import StepMetrics

ROLLOUTS, PROMPTS, SAMPLES = 2, 3, 4
BATCH = 5  # 12 samples a rollout: updates of 4, 4 and 4
UPDATES = ROLLOUTS * len(split_updates(PROMPTS * SAMPLES, BATCH))
TEMPERATURE, CLIP, MAX_NORM, DECAY = 0.8, (0.2, 0.28), 0.5, 0.1
# Large: the gradient of a key's bias is zero up to rounding, and Adam would blow that rounding up to a whole step.
EPS, LR = 1e-4, 2e-3
OPTIMIZER = OptimizerConfig(
    lr_scheduler="linear",
    lr_warmup_ratio=0.0,
    max_norm=MAX_NORM,
    adam=AdamConfig(lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=DECAY),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One combination of algorithm flags."""

    estimator: str
    kl_in_loss: str | None
    aggregation: str = "token_mean"
    gamma: float = 1.0
    kl_coef: float = 0.05


def record_rollouts(seed: int = 0) -> list[list[Trajectory]]:
    """Ragged samples with rewards; some have tokens of an environment between two turns of the policy."""
    rng = random.Random(seed)

    def sample(group: int, number: int) -> Trajectory:
        prompt, first, feedback, second = (rng.randint(1, 6), rng.randint(1, 12), rng.randint(1, 4), rng.randint(1, 6))
        two_turns = number % 3 == 2
        length = prompt + first + (feedback + second if two_turns else 0)
        ranges = [(prompt, prompt + first)] + ([(length - second, length)] if two_turns else [])
        tokens = [rng.randint(3, 511) for _ in range(length)]
        reward = round(rng.uniform(-1, 2), 3)
        return Trajectory(group, number, "", None, [Segment(tokens, ranges)], reward=reward, score=reward)

    return [
        [sample(step * PROMPTS + group, number) for group in range(PROMPTS) for number in range(SAMPLES)]
        for step in range(ROLLOUTS)
    ]


def chosen_samples(step: int) -> list[list[int]]:
    """Which samples each update of a rollout takes."""
    order = random.Random(step).sample(range(PROMPTS * SAMPLES), PROMPTS * SAMPLES)
    updates = []
    for size in split_updates(PROMPTS * SAMPLES, BATCH):
        updates.append(sorted(order[:size]))
        order = order[size:]
    return updates


def token_logprobs(model: Any, sample: Trajectory) -> tuple[torch.Tensor, list[int]]:
    """Log-probs of the sampled tokens of one sample, one row, whole logits; and the turn of each."""
    ids = torch.tensor(sample.segments[0].tokens)
    logits = model(ids[None]).logits[0] / TEMPERATURE
    places = [t for start, stop in sample.segments[0].action_ranges for t in range(start, stop)]
    return torch.stack([logits[t - 1].log_softmax(-1)[ids[t]] for t in places]), places


def plain_advantages(case: Case, samples: list[Trajectory], kls: list[list[float]]) -> list[list[float]]:
    """From the formulas, one sample and one token at a time."""
    scalars = []
    for sample in samples:
        rewards = [other.reward for other in samples if other.group_id == sample.group_id]
        mean = sum(rewards) / len(rewards)
        std = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5
        scalars.append(
            {
                "reinforce": sample.reward,
                "reinforce_baseline": sample.reward - mean,
                "rloo": (sample.reward - mean) * len(rewards) / (len(rewards) - 1),
                "group_norm": (sample.reward - mean) / (std + 1e-9),
                "dr_grpo": sample.reward - mean,
            }[case.estimator]
        )
    result = []
    for scalar, kl in zip(scalars, kls, strict=True):
        coefficient = 0.0 if case.kl_in_loss else case.kl_coef
        rewards = [-coefficient * value for value in kl]
        rewards[-1] += max(-10.0, min(10.0, scalar))
        returns, running = [], 0.0
        for reward in reversed(rewards):
            running = reward + case.gamma * running
            returns.insert(0, running)
        result.append(returns)
    if case.estimator in ("reinforce", "reinforce_baseline"):
        flat = [value for returns in result for value in returns]
        mean = sum(flat) / len(flat)
        std = max(sum((value - mean) ** 2 for value in flat) / len(flat), 1e-8) ** 0.5
        result = [[(value - mean) / std for value in returns] for returns in result]
    return result


def plain_sample_loss(case: Case, new: Any, old: Any, ref: Any, advantages: Any) -> torch.Tensor:
    """Token losses of one sample."""
    ratio = (new - old).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP[0], 1 + CLIP[1]) * advantages)
    if case.kl_in_loss:
        d = new - ref
        loss = loss + case.kl_coef * (d**2 / 2 if case.kl_in_loss == "k2" else (-d).exp() - 1 + d)
    return loss


def plain_run(folder: Path, case: Case) -> dict[str, Any]:
    """The whole run in plain PyTorch. Returns: loss, norm and rate of each update, and the last weights."""
    # In float64: float32's own rounding moves the norm of a gradient by as much as the product may be off.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    reference = copy.deepcopy(model)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=UPDATES)
    losses, norms, rates = [], [], []
    for step, samples in enumerate(record_rollouts()):
        with torch.no_grad():
            old = [token_logprobs(model, sample)[0] for sample in samples]
            ref = [token_logprobs(reference, sample)[0] for sample in samples]
        kls = [(o - r).tolist() for o, r in zip(old, ref, strict=True)]
        advantages = [torch.tensor(values) for values in plain_advantages(case, samples, kls)]
        for chosen in chosen_samples(step):
            parts = []
            for i in chosen:
                new, _ = token_logprobs(model, samples[i])
                parts.append(plain_sample_loss(case, new, old[i], ref[i], advantages[i]))
            if case.aggregation == "token_mean":
                loss = torch.cat(parts).mean()
            elif case.aggregation == "seq_mean":
                loss = torch.stack([part.mean() for part in parts]).mean()
            else:
                loss = torch.cat(parts).sum() / (len(parts) * 16)
            loss.backward()
            losses.append(loss.item())
            rates.append(optimizer.param_groups[0]["lr"])
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "rates": rates, "weights": dict(model.named_parameters())}


def product_run(folder: Path, case: Case, stage: int, budget: Budget) -> dict[str, Any]:
    """The same run on this rank with the product's parts, as the controller puts them together."""
    from openrlhf.backends.deepspeed_backend import DeepSpeedBackend

    ds = DeepSpeedConfig(zero_stage=stage, param_dtype="fp32")
    # Otherwise nothing of a tiny model is large enough to be sharded on stage 3.
    common = {"ds": ds, "device": "cpu", "keep_whole": 0}
    backend = DeepSpeedBackend.for_training(folder, optimizer=OPTIMIZER, total_steps=UPDATES, **common)
    reference = DeepSpeedBackend.for_inference(folder, **common)
    kl = KLConfig(init_coef=case.kl_coef, use_loss=bool(case.kl_in_loss), estimator=case.kl_in_loss or "k1")
    algo = AlgoConfig(advantage=AdvantageConfig(estimator=case.estimator, gamma=case.gamma), kl=kl)
    spec = PolicyLossSpec("ppo", *CLIP, None, case.aggregation, 16.0, case.kl_in_loss, TEMPERATURE)
    losses, norms, rates, ratios = [], [], [], []
    for step, samples in enumerate(record_rollouts()):
        experience = build_experience(samples)
        fields = experience.batch.token_fields
        with torch.no_grad():
            fields["old_logprobs"] = backend.forward(experience.batch, temperature=TEMPERATURE).logprobs
            fields["ref_logprobs"] = reference.forward(experience.batch, temperature=TEMPERATURE).logprobs
        add_advantages(experience, algo, RewardShaping((-10.0, 10.0)), case.kl_coef)
        for chosen in chosen_samples(step):
            rows = experience.rows_of(chosen)
            shares, _ = deal(experience.batch, rows, backend.world_size, budget, pad_token_id=0)
            units = denominator(experience, rows, case.aggregation)
            result = update_policy(backend, StepShare(shares[backend.rank], units, case.kl_coef), spec)
            losses.append(backend.all_reduce(result.loss))
            norms.append(result.step.grad_norm)
            rates.append(result.step.lr)
            ratios.append(backend.all_reduce(result.sums.get("ratio_mean", 0.0)) / backend.all_reduce(result.count))
            assert result.warning is None, result.warning
    weights = {name: tensor.detach().clone() for name, tensor in backend.named_full_parameters()}
    return {"losses": losses, "norms": norms, "rates": rates, "weights": weights, "ratios": ratios}


def one_update_run(folder: Path, case: Case, loss: str, *, scored: bool) -> dict[str, Any]:
    """Rollouts of one update each, with the pass for the old log-probs and without it; one rank.

    Args:
        loss: the policy loss.
        scored: the old log-probs are computed before the update, in the same micro-batches.

    Returns: losses, norms, KLs to the reference (none where the case has none), sums of the metrics, last weights.
    """
    from openrlhf.backends.deepspeed_backend import DeepSpeedBackend

    ds = DeepSpeedConfig(zero_stage=1, param_dtype="fp32")
    backend = DeepSpeedBackend.for_training(folder, ds=ds, optimizer=OPTIMIZER, total_steps=ROLLOUTS, device="cpu")
    reference = DeepSpeedBackend.for_inference(folder, ds=ds, device="cpu") if case.kl_in_loss else None
    kl = KLConfig(init_coef=case.kl_coef if reference else 0.0, use_loss=True, estimator=case.kl_in_loss or "k3")
    algo = AlgoConfig(advantage=AdvantageConfig(estimator=case.estimator), kl=kl)
    spec = PolicyLossSpec(loss, *CLIP, None, case.aggregation, 16.0, case.kl_in_loss, TEMPERATURE, True, 0.01)
    found: dict[str, Any] = {"losses": [], "norms": [], "kls": [], "sums": []}
    for samples in record_rollouts():
        experience = build_experience(samples)
        fields, rows = experience.batch.token_fields, list(range(experience.batch.num_rows))
        # In the order of the micro-batches of the update, so that the passes differ in nothing but the gradient.
        dealt = deal(experience.batch, rows, 1, Budget(5, None), pad_token_id=0)
        if reference is not None:
            fields["ref_logprobs"] = _dealt_logprobs(reference, experience.batch, dealt)
        old = _dealt_logprobs(backend, experience.batch, dealt) if scored else None
        if old is not None:
            fields["old_logprobs"] = old
        metrics = StepMetrics()
        add_advantages(experience, algo, RewardShaping((-10.0, 10.0)), kl.init_coef)
        metrics.add_experience(experience, kl.estimator, RewardShaping((-10.0, 10.0)))
        shares, _ = deal(experience.batch, rows, 1, Budget(5, None), pad_token_id=0)
        units = denominator(experience, rows, case.aggregation)
        result = update_policy(backend, StepShare(shares[0], units, kl.init_coef), spec)
        metrics.actor.add([result])
        metrics.finish(1.0)
        found["losses"].append(result.loss)
        found["norms"].append(result.step.grad_norm)
        found["kls"].append(metrics.values.get("kl/reference"))
        found["sums"].append({name: value for name, value in result.sums.items() if name != "kl_reference"})
    weights = {name: tensor.detach().clone() for name, tensor in backend.named_full_parameters()}
    return {**found, "weights": weights}


def _dealt_logprobs(backend: Any, batch: Any, dealt: Any) -> torch.Tensor:
    result, starts = torch.zeros(batch.tokens.numel()), batch.cu_seqlens.tolist()
    for micro, rows in zip(dealt[0][0], dealt[1][0], strict=True):
        with torch.no_grad():
            logprobs = backend.forward(micro, temperature=TEMPERATURE).logprobs
        for row, part in zip(rows, logprobs.split(micro.lengths.tolist()), strict=True):
            result[starts[row] : starts[row + 1]] = part
    return result
