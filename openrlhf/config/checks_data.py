"""Checks of the data flags against each other."""

from __future__ import annotations

from openrlhf.config.commands import PPOConfig, SFTConfig, TrainingConfig
from openrlhf.config.data import CorpusConfig
from openrlhf.config.errors import ConfigError

SLOT = "{}"


def check_data(config: TrainingConfig) -> None:
    """Raises ConfigError where data flags are missing or do not fit together."""
    data = config.data
    rl = isinstance(config, PPOConfig)
    group, dataset, probs = (
        ("prompt", data.prompt_dataset, data.prompt_probs) if rl else ("dataset", data.dataset, data.dataset_probs)
    )
    dataset_flag = "--data.prompt_dataset" if rl else "--data.dataset"
    if not dataset or not dataset.strip():
        raise ConfigError(f"{dataset_flag} is missing: give a file, a folder or a hub name, or several with commas.")
    check_probabilities(dataset, probs, dataset_flag, f"--data.{group}_probs")
    check_template(data, type(data)().input_template)
    if config.eval.steps > 0 and not config.eval.dataset:
        raise ConfigError("--eval.steps is set without --eval.dataset; name what to evaluate on, or leave it out.")
    if isinstance(config, SFTConfig):
        check_sft(config)
    if rl and data.max_len <= (config.rollout.max_new_tokens or 0):
        raise ConfigError(
            f"--rollout.max_new_tokens {config.rollout.max_new_tokens} leaves no room for a prompt in --data.max_len "
            f"{data.max_len}, which counts both; raise --data.max_len."
        )


def check_probabilities(dataset: str, probs: str | None, dataset_flag: str, probs_flag: str) -> None:
    """Raises ConfigError where the mixing probabilities are no numbers or not one for each data set."""
    if probs is None:
        return
    names = dataset.split(",")
    try:
        numbers = [float(part) for part in probs.split(",")]
    except ValueError:
        raise ConfigError(f"{probs_flag} takes numbers with commas between them, found {probs!r}.") from None
    if len(numbers) != len(names):
        raise ConfigError(
            f"{probs_flag} holds {len(numbers)} numbers for {len(names)} data sets in {dataset_flag}; give one each."
        )
    if not all(0 < number < float("inf") for number in numbers):
        raise ConfigError(
            f"{probs_flag} takes numbers above 0, found {probs!r}; leave out a data set that is not wanted."
        )


def check_template(data: CorpusConfig, default: str | None) -> None:
    """Raises ConfigError where a prompt would not appear in its template, or two templates are given.

    Args:
        default: the template of a command line that names none; a chat template replaces it silently.
    """
    template = data.input_template
    if template is None or template == default:
        return
    if template.count(SLOT) != 1:
        raise ConfigError(
            f"--data.input_template has {template.count(SLOT)} slots {SLOT} and needs exactly one, where the prompt "
            f"goes in; found {template!r}."
        )
    if data.apply_chat_template:
        raise ConfigError(
            "--data.input_template and --data.apply_chat_template are two ways to render a prompt; keep one."
        )


def template_notes(data: CorpusConfig) -> list[str]:
    """Returns: a warning where the shell passed a backslash and an n instead of a line break."""
    if data.input_template is None or "\\n" not in data.input_template:
        return []
    return [
        f"--data.input_template holds a literal \\n (two characters), not a line break: {data.input_template!r}; "
        "in bash, write $'...\\n...'."
    ]


def check_sft(config: SFTConfig) -> None:
    """Raises ConfigError where no response to train on is named."""
    data, pretrain = config.data, config.model.pretrain_mode_enable
    if data.multiturn and pretrain:
        raise ConfigError(
            "--data.multiturn trains on answers and --model.pretrain_mode_enable on everything; keep one."
        )
    if data.multiturn and not data.apply_chat_template:
        raise ConfigError(
            "--data.multiturn finds the answers through the chat template; add --data.apply_chat_template."
        )
    if data.output_key is None and not data.apply_chat_template and not pretrain:
        raise ConfigError(
            "--data.output_key is missing: name the column of the response, or give conversations with "
            "--data.apply_chat_template, or train on all text with --model.pretrain_mode_enable."
        )
