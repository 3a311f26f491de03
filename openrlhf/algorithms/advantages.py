"""Advantages of a whole rollout batch, from the rewards of its trajectories.

Every estimator is a pure function of one record, ``AdvantageInputs``, and stands in one registry. All but ``gae`` are
the same three steps: a scalar a trajectory (the reward, or how it compares with its group), the discounted sum of what
follows each token, and for some a whitening over the batch. ``gae`` sets a critic's values against that sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from openrlhf.algorithms.aggregate import mask_out, row_of_token, sum_by_row
from openrlhf.algorithms.groups import group_statistics
from openrlhf.algorithms.registry import look_up, register
from openrlhf.algorithms.shaping import clip_rewards
from openrlhf.algorithms.token_returns import generalized_advantages, reward_to_go, terminal_rewards, whiten

GROUP_STD_EPSILON = 1e-9
TOKEN_REWARD_TOLERANCE = 1e-4


@dataclass(frozen=True)
class AdvantageInputs:
    """All that an estimator may look at: N trajectories of T tokens in all, of the whole rollout batch.

    Attributes:
        rewards: float [N]; anything, NaN too, where ``scored`` is False.
        scored: bool [N]; False where no reward could be computed. Such a trajectory is in no statistic and gets 0.
        group_ids: int64 [N], equal for the samples of one prompt; in any order.
        mask: bool [T], True where the policy produced the token.
        cu_seqlens: [N + 1], bounds of the trajectories; the segments of one stand end to end.
        kl: float [T], KL to the reference at each token, in nats, to be taken from the reward; None where there is no
            reference model or where the KL is in the loss.
        kl_coef: beta, reward per nat.
        gamma: discount per token that the policy produced.
        reward_clip: (low, high) for the scalar of a trajectory, after the group baseline; None for no bounds.
        whiten_std: False leaves out the division by the standard deviation where an estimator whitens.
        values: float [T], a critic's value of the state before each token, for ``gae``; None without a critic.
        lambd: lambda of ``gae``.
        token_rewards: float [T], where rewards come turn by turn: each at the last token of the policy in the turn
            that earned it; over a trajectory they sum to ``rewards``. ``gae`` and ``reinforce`` place them so; the
            estimators that compare the samples of a group look at ``rewards`` alone. None puts the whole reward on the
            last trained token.

    Raises:
        ValueError: for a tensor of another size, a scored trajectory whose reward is not a finite number, or token
            rewards that do not sum to it.
    """

    rewards: torch.Tensor
    scored: torch.Tensor
    group_ids: torch.Tensor
    mask: torch.Tensor
    cu_seqlens: torch.Tensor
    kl: torch.Tensor | None = None
    kl_coef: float = 0.0
    gamma: float = 1.0
    reward_clip: tuple[float, float] | None = None
    whiten_std: bool = True
    values: torch.Tensor | None = None
    lambd: float = 1.0
    token_rewards: torch.Tensor | None = None

    def __post_init__(self) -> None:
        rows, tokens = self.cu_seqlens.numel() - 1, int(self.cu_seqlens[-1])
        for name, tensor, size in (
            ("rewards", self.rewards, rows),
            ("scored", self.scored, rows),
            ("group_ids", self.group_ids, rows),
            ("mask", self.mask, tokens),
            ("kl", self.kl, tokens),
            ("values", self.values, tokens),
            ("token_rewards", self.token_rewards, tokens),
        ):
            if tensor is not None and tensor.numel() != size:
                raise ValueError(f"{name} has {tensor.numel()} entries, cu_seqlens asks for {size}")
        bad = (self.scored.bool() & ~self.rewards.isfinite()).nonzero().flatten().tolist()
        if bad:
            raise ValueError(f"trajectories {bad} are marked as scored, but their rewards are not finite numbers")
        if self.token_rewards is not None:
            self._check_token_rewards(self.token_rewards)

    def _check_token_rewards(self, token_rewards: torch.Tensor) -> None:
        trained = self.trained()
        placed = mask_out(token_rewards.double(), trained)
        total = sum_by_row(placed, self.cu_seqlens)
        allowed = TOKEN_REWARD_TOLERANCE * (1 + sum_by_row(placed.abs(), self.cu_seqlens))
        # Written so that a NaN is refused too.
        close = (total - self.rewards.double()).abs() <= allowed
        somewhere = sum_by_row(trained.long(), self.cu_seqlens) > 0
        bad = (somewhere & ~close).nonzero().flatten().tolist()
        if bad:
            raise ValueError(
                f"the token rewards of trajectories {bad} sum to {total[bad].tolist()} over the tokens that the policy "
                f"produced, their rewards are {self.rewards[bad].tolist()}; place every reward on such a token"
            )

    def trained(self) -> torch.Tensor:
        """Returns: bool [T], tokens of the policy in trajectories that have a reward."""
        return self.mask.bool() & self.scored.bool()[row_of_token(self.cu_seqlens)]


Estimator = Callable[[AdvantageInputs], tuple[torch.Tensor, torch.Tensor]]

ESTIMATORS: dict[str, Estimator] = {}


def register_estimator(name: str) -> Callable[[Estimator], Estimator]:
    """Enters the decorated function into ``ESTIMATORS``.

    Raises:
        ValueError: where the name is taken.
    """
    return register(ESTIMATORS, "advantage estimator", name)


def compute_advantages(name: str, inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of a rollout batch by the estimator ``name``.

    Returns:
        advantages [T] and returns [T] (before any whitening; what a critic learns), 0 where nothing is trained.

    Raises:
        ValueError: for an unknown name, or ``gae`` without values.
    """
    return look_up(ESTIMATORS, "advantage estimator", name)(inputs)


def group_baseline(inputs: AdvantageInputs) -> torch.Tensor:
    """Returns: [N], reward minus the mean of its group (Dr. GRPO, arXiv 2503.20783; REINFORCE++-baseline)."""
    stats = group_statistics(inputs.rewards, inputs.scored, inputs.group_ids)
    return mask_out(inputs.rewards - stats.mean, ~stats.flat)


def leave_one_out(inputs: AdvantageInputs) -> torch.Tensor:
    """Returns: [N], reward minus the mean of the others of its group, n / (n - 1) (R - mean); arXiv 2402.14740."""
    stats = group_statistics(inputs.rewards, inputs.scored, inputs.group_ids)
    factor = stats.count / (stats.count - 1).clamp(min=1)
    return mask_out(factor * (inputs.rewards - stats.mean), ~stats.flat)


def group_norm(inputs: AdvantageInputs) -> torch.Tensor:
    """Returns: [N], (R - mean) / (unbiased std + 1e-9) of its group (GRPO, arXiv 2402.03300, section 4.1.2)."""
    stats = group_statistics(inputs.rewards, inputs.scored, inputs.group_ids)
    return mask_out((inputs.rewards - stats.mean) / (stats.std + GROUP_STD_EPSILON), ~stats.flat)


def length_weighted_baseline(inputs: AdvantageInputs) -> torch.Tensor:
    """Returns: [N], R - sum(len R) / sum(len) over its group, len = trained tokens (OPO, arXiv 2505.23585)."""
    stats = group_statistics(inputs.rewards, inputs.scored, inputs.group_ids)
    rewards = mask_out(inputs.rewards, inputs.scored)
    lengths = sum_by_row(inputs.trained().to(rewards.dtype), inputs.cu_seqlens)
    groups, group = torch.unique(inputs.group_ids, return_inverse=True)
    zeros = rewards.new_zeros(groups.numel())
    total = zeros.index_add(0, group, lengths)
    baseline = zeros.index_add(0, group, lengths * rewards) / total.clamp(min=1)
    return mask_out(rewards - baseline[group], ~stats.flat)


def terminal_token_rewards(scalars: torch.Tensor, inputs: AdvantageInputs) -> torch.Tensor:
    """r_t = -beta KL_t + 1[last trained token] clip(scalar) (arXiv 2501.03262).

    Args:
        scalars: [N], one a trajectory.

    Returns: [T], 0 where nothing is trained.
    """
    clipped = clip_rewards(mask_out(scalars, inputs.scored), inputs.reward_clip)
    return _less_kl(terminal_rewards(clipped, inputs.trained(), inputs.cu_seqlens), inputs)


def environment_token_rewards(inputs: AdvantageInputs) -> torch.Tensor:
    """The rewards where they were earned, less the KL: ``token_rewards``, each clipped, or else the terminal ones.

    Returns: [T], 0 where nothing is trained.
    """
    if inputs.token_rewards is None:
        return terminal_token_rewards(inputs.rewards, inputs)
    rewards = mask_out(inputs.token_rewards.to(inputs.rewards.dtype), inputs.trained())
    # 0 stands where there is no reward, and a clip range without 0 in it must not make one there.
    return _less_kl(torch.where(rewards == 0, rewards, clip_rewards(rewards, inputs.reward_clip)), inputs)


def _less_kl(rewards: torch.Tensor, inputs: AdvantageInputs) -> torch.Tensor:
    if inputs.kl is None:
        return rewards
    return rewards - inputs.kl_coef * mask_out(inputs.kl.to(rewards.dtype), inputs.trained())


def _returns(rewards: torch.Tensor, inputs: AdvantageInputs) -> torch.Tensor:
    return reward_to_go(rewards, inputs.trained(), inputs.cu_seqlens, inputs.gamma)


def returns_from(scalars: torch.Tensor, inputs: AdvantageInputs) -> torch.Tensor:
    """Returns: [T], reward-to-go of ``terminal_token_rewards`` of ``scalars`` [N]; 0 where nothing is trained."""
    return _returns(terminal_token_rewards(scalars, inputs), inputs)


@register_estimator("gae")
def gae(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE (arXiv 1506.02438) with a critic: advantages whitened over the batch's tokens, returns A + V not whitened."""
    if inputs.values is None:
        raise ValueError("the advantage estimator gae needs the values of a critic")
    advantages, returns = generalized_advantages(
        environment_token_rewards(inputs),
        inputs.values.detach(),
        inputs.trained(),
        inputs.cu_seqlens,
        inputs.gamma,
        inputs.lambd,
    )
    return whiten(advantages, inputs.trained(), inputs.whiten_std), returns


@register_estimator("reinforce")
def reinforce_plus_plus(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++ (arXiv 2501.03262): reward-to-go of the reward itself, whitened over the batch's tokens."""
    returns = _returns(environment_token_rewards(inputs), inputs)
    return whiten(returns, inputs.trained(), inputs.whiten_std), returns


@register_estimator("reinforce_baseline")
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++-baseline (arXiv 2501.03262): the group's mean is taken off first, then the same."""
    returns = returns_from(group_baseline(inputs), inputs)
    return whiten(returns, inputs.trained(), inputs.whiten_std), returns


@register_estimator("rloo")
def rloo(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """RLOO (arXiv 2402.14740): reward-to-go of the leave-one-out reward, not whitened."""
    returns = returns_from(leave_one_out(inputs), inputs)
    return returns, returns


@register_estimator("group_norm")
def grpo(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """GRPO (arXiv 2402.03300): reward-to-go of the reward normalised in its group, not whitened over the batch."""
    returns = returns_from(group_norm(inputs), inputs)
    return returns, returns


@register_estimator("dr_grpo")
def dr_grpo(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Dr. GRPO (arXiv 2503.20783): reward-to-go of reward minus group mean, neither normalised nor whitened."""
    returns = returns_from(group_baseline(inputs), inputs)
    return returns, returns


@register_estimator("opo")
def opo(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """OPO (arXiv 2505.23585): reward-to-go of the reward minus the length-weighted mean of its group, not whitened."""
    returns = returns_from(length_weighted_baseline(inputs), inputs)
    return returns, returns
