"""Refusing what cannot work, filling in what was left open: the steps between parsing and running."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from pathlib import Path

from openrlhf.config.algo import default_aggregation
from openrlhf.config.checks_combiner import check_combiner
from openrlhf.config.checks_data import check_data
from openrlhf.config.checks_rl import check_rl
from openrlhf.config.checks_serve import check_serve
from openrlhf.config.checks_system import check_system
from openrlhf.config.checks_training import check_training
from openrlhf.config.checks_values import check_values
from openrlhf.config.ckpt import CkptConfig
from openrlhf.config.commands import (
    Config,
    DPOConfig,
    LoraCombinerConfig,
    PPOConfig,
    ServeRMConfig,
    TrainingConfig,
    command_of,
)
from openrlhf.config.flags_yaml import CONFIG_FILE
from openrlhf.config.unbuilt import check_unbuilt


def check(config: Config) -> None:
    """Raises ConfigError for the first thing in a config that cannot be run, be it missing, wrong or not built yet."""
    check_values(config)
    check_unbuilt(config)
    if isinstance(config, LoraCombinerConfig):
        check_combiner(config)
    if isinstance(config, TrainingConfig):
        check_training(config)
        check_data(config)
    if isinstance(config, PPOConfig):
        check_rl(config)
    if isinstance(config, TrainingConfig):
        check_system(config)
    if isinstance(config, ServeRMConfig):
        check_serve(config)


def resolve(config: Config) -> Config:
    """Fills in what was left open and can be told from the rest.

    Returns: a config with a run name (a resumed run goes on under the one that it had), absolute paths, the chat
    template alone where it is asked for, and for RL an aggregation of the loss and, where micro-batches go by tokens, a
    budget for log-probs.
    """
    if not isinstance(config, TrainingConfig):
        return config
    logger = config.logger
    if logger.wandb.run_name is None:
        name = _earlier_run_name(config.ckpt) or f"{command_of(config)}_{datetime.now():%m%dT%H:%M}"
        logger = dataclasses.replace(logger, wandb=dataclasses.replace(logger.wandb, run_name=name))
    data = config.data
    if data.apply_chat_template:
        data = dataclasses.replace(data, input_template=None)
    config = _with_absolute_paths(dataclasses.replace(config, logger=logger, data=data))
    if not isinstance(config, PPOConfig):
        return config
    default = default_aggregation(config.algo.advantage.estimator, config.actor.policy_loss_type)
    algo = dataclasses.replace(config.algo, loss_aggregation=config.algo.loss_aggregation or default)
    rollout = config.rollout
    if config.train.dynamic_batch_enable and rollout.max_tokens_per_gpu is None:
        rollout = dataclasses.replace(rollout, max_tokens_per_gpu=config.train.max_tokens_per_gpu)
    return dataclasses.replace(config, algo=algo, rollout=rollout)


def _earlier_run_name(ckpt: CkptConfig) -> str | None:
    """The name of the run that is resumed, so that TensorBoard finds one curve and not two.

    It stands in the settings beside the metrics, which a resumed run continues too.
    """
    file = Path(ckpt.output_dir) / CONFIG_FILE
    if not ckpt.load_enable or not file.is_file():
        return None
    import yaml

    try:
        return yaml.safe_load(file.read_text())["logger"]["wandb"]["run_name"]
    except (yaml.YAMLError, KeyError, TypeError):
        # A kill or a full disk left half a file: the run gets a new name.
        return None


def _with_absolute_paths(config: TrainingConfig) -> TrainingConfig:
    """The workers of a cluster do not stand in the folder from which the command was given."""

    def absolute(path: str | None) -> str | None:
        return str(Path(path).absolute()) if path and Path(path).exists() else path

    ckpt = dataclasses.replace(
        config.ckpt,
        output_dir=str(Path(config.ckpt.output_dir).absolute()),
        path=str(Path(config.ckpt.path).absolute()),
    )
    config = dataclasses.replace(config, ckpt=ckpt)
    if not isinstance(config, PPOConfig):
        model = dataclasses.replace(config.model, model_name_or_path=absolute(config.model.model_name_or_path))
        config = dataclasses.replace(config, model=model)
        if not isinstance(config, DPOConfig):
            return config
        ref = dataclasses.replace(config.ref, model_name_or_path=absolute(config.ref.model_name_or_path))
        return dataclasses.replace(config, ref=ref)
    return dataclasses.replace(
        config,
        actor=dataclasses.replace(config.actor, model_name_or_path=absolute(config.actor.model_name_or_path)),
        critic=dataclasses.replace(config.critic, model_name_or_path=absolute(config.critic.model_name_or_path)),
        reward=dataclasses.replace(
            config.reward,
            remote_url=absolute(config.reward.remote_url or None),
            model_name_or_path=",".join(absolute(name) for name in config.reward_models) or None,
        ),
        train=dataclasses.replace(config.train, agent_func_path=absolute(config.train.agent_func_path or None)),
    )
