"""Flags that are understood but whose feature does not exist yet, so that none is accepted and ignored.

A feature that gets built takes its line out of this table, and nothing else changes here.
"""

from __future__ import annotations

from openrlhf.config.commands import Config
from openrlhf.config.errors import ConfigError
from openrlhf.config.flags import flags_of

# flag -> feature, for every command that has the flag; refused unless it stands at its default.
FLAGS = {
    "use_ms": "ModelScope",
    "data.max_images_per_prompt": "training on images",
    "ds.tensor_parallel_size": "tensor parallel training",
    "ds.ring_attn_size": "ring attention",
    "model.aux_loss_coef": "the router balancing loss",
    "actor.aux_loss_coef": "the router balancing loss",
    "actor.freeze_visual_encoder": "training on images",
    "train.async_enable": "asynchronous training",
    "train.partial_rollout_enable": "asynchronous training",
    "rollout.vllm_generate_batch_size": "asynchronous training",
    "vllm.sync_with_ray": "weight transfer through Ray's collectives",
}


def unbuilt_flags(tree: type) -> list[str]:
    """Returns: the names of a command's flags whose feature does not exist yet, on whatever device."""
    return [name for name in flags_of(tree) if name in FLAGS]


def check_unbuilt(config: Config) -> None:
    """Raises ConfigError for the first flag that asks for a feature which does not exist yet."""
    _check_off(config, FLAGS)


def _check_off(config: Config, features: dict[str, str]) -> None:
    flags = flags_of(type(config))
    for name, feature in features.items():
        if name not in flags:
            continue
        value = flags[name].value(config)
        if value != flags[name].default:
            raise ConfigError(f"--{name} asks for {feature}, which is not built yet; leave the flag out.")
