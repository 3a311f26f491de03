"""How many prompts and optimizer steps each rollout step of a run has, known before the run."""

from __future__ import annotations

from openrlhf.config import ConfigError, PPOConfig
from openrlhf.data.batching import split_updates

# Whose rate after the warm-up does not depend on how long they are.
_WITHOUT_AN_END = ("constant", "constant_with_warmup", "inverse_sqrt")


def step_prompts(config: PPOConfig, prompts: int) -> list[int]:
    """Returns: the prompts of each step of a run, in order; under a filter, which takes more for each, at most these.

    Without a filter the last step of an episode takes what is left; with one, steps run on into the next episode.
    """
    size, episodes = config.rollout.batch_size, config.train.num_episodes
    if config.algo.dynamic_filtering_enable:
        prompts, episodes = prompts * episodes, 1
    whole, rest = divmod(prompts, size)
    return ([size] * whole + [rest] * (rest > 0)) * episodes


def step_updates(config: PPOConfig, prompts: int) -> list[int]:
    """Returns: the optimizer steps of the critic, and of an actor that is never frozen, in each step of a run."""
    samples, train = config.rollout.n_samples_per_prompt, config.train
    return [
        len(split_updates(count * samples, train.batch_size)) * train.max_epochs
        for count in step_prompts(config, prompts)
    ]


def filter_note(config: PPOConfig, prompts: int) -> str | None:
    """Returns: what a filter does to the schedule of the learning rate, whose length no one knows; None without one."""
    if not config.algo.dynamic_filtering_enable or config.actor.optimizer.lr_scheduler in _WITHOUT_AN_END:
        return None
    updates = sum(step_updates(config, prompts)[frozen_steps(config) :])
    return (
        f"--algo.dynamic_filtering_enable: the schedule of the learning rate spans {updates} updates, as many as there "
        "are if every group passes. Each group that is dropped brings the end nearer, so the rate does not come down "
        "as far; steps and time left are upper bounds as well."
    )


def check_frozen(config: PPOConfig, prompts: int) -> None:
    """Raises ConfigError where the policy would be frozen to the end."""
    steps = len(step_prompts(config, prompts))
    if frozen_steps(config) >= steps:
        raise ConfigError(
            f"--critic.freezing_steps {frozen_steps(config)} covers all {steps} steps of the run, so the policy would "
            "never be trained; lower it or raise --train.num_episodes."
        )


def frozen_steps(config: PPOConfig) -> int:
    """Returns: first steps in which the critic is trained alone."""
    return max(0, config.critic.freezing_steps) if config.has_critic else 0
