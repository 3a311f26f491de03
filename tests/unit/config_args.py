"""Command lines that pass every check, for tests to change one thing in."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openrlhf.config import COMMANDS, Config, check, check_device
from openrlhf.config.flags import Flag, flags_of
from openrlhf.config.settings import from_words

RL = {
    "--actor.model_name_or_path": "./model",
    "--actor.num_gpus_per_node": "1",
    "--ref.num_gpus_per_node": "1",
    "--reward.remote_url": "reward.py",
    "--data.prompt_dataset": "prompts.jsonl",
    "--algo.advantage.estimator": "reinforce",
}
SFT = {
    "--model.model_name_or_path": "./model",
    "--data.dataset": "rows.jsonl",
    "--data.output_key": "output",
}
RM = {
    "--model.model_name_or_path": "./model",
    "--data.dataset": "pairs.jsonl",
}
DPO = {"--model.model_name_or_path": "./model", "--data.dataset": "rows.jsonl", "--data.prompt_key": "q"}


def make_files(folder: Path) -> None:
    """Writes what the command lines name, as far as the checks look."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "qwen2", "max_position_embeddings": 2048}')
    (folder / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': [0.0]}\n")


def words(base: dict[str, str], *extra: str) -> list[str]:
    """Returns: ``base`` as words, then ``extra``."""
    return [word for pair in base.items() for word in pair] + list(extra)


def rl(*extra: str) -> Config:
    """Returns: a checked train_ppo_ray config with further flags."""
    return checked(built("train_ppo_ray", RL, *extra))


def sft(*extra: str) -> Config:
    """Returns: a checked train_sft config with further flags."""
    return checked(built("train_sft", SFT, *extra))


def checked(config: Config) -> Config:
    """Returns: the config, if no check refuses it on a CPU."""
    check(config)
    check_device(config, "cpu")
    return config


def built(command: str, base: dict[str, str], *extra: str) -> Config:
    """Returns: the config of a command line, unchecked, without the time that tyro takes to build one."""
    flags = flags_of(COMMANDS[command])
    config = COMMANDS[command]()
    for setting in from_words(words(base, *extra), flags):
        config = with_value(config, flags[setting.name], _value(flags[setting.name], setting.words))
    return config


def _value(flag: Flag, given: list[str]) -> Any:
    if flag.kind is bool:
        return given == ["True"]
    if flag.optional and given == ["None"]:
        return None
    values = tuple(json.loads(word) if flag.kind is dict else flag.kind(word) for word in given)
    return values if flag.nargs else values[0]


def with_value(config: Any, flag: Flag, value: Any) -> Any:
    """Returns: the config with one flag's value replaced."""

    def replaced(node: Any, path: tuple[str, ...]) -> Any:
        name, rest = path[0], path[1:]
        return dataclasses.replace(node, **{name: replaced(getattr(node, name), rest) if rest else value})

    return replaced(config, flag.path)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Sets environment variables for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
