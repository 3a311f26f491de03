"""What a model must allow before any process is started: the same for SFT and RL."""

from __future__ import annotations

from openrlhf.config import PPOConfig, SFTConfig
from openrlhf.models.loading import check_context


def run(config: SFTConfig | PPOConfig) -> None:
    """Reads the model's config, not its weights.

    Raises: ConfigError where there is no such model, or --data.max_len is longer than it can place.
    """
    model = config.actor if isinstance(config, PPOConfig) else config.model
    check_context(model.model_name_or_path, config.data.max_len, trust_remote_code=config.trust_remote_code)
