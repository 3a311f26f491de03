"""Checks of the data flags against each other."""

from __future__ import annotations

from openrlhf.config.commands import DPOConfig, PPOConfig, RMConfig, SFTConfig, TrainingConfig
from openrlhf.config.data import CorpusConfig
from openrlhf.config.errors import ConfigError
from openrlhf.config.mixing import mixing_weights, split_names

SLOT = "{}"
# What a shell leaves of a line break or a tab that was meant.
LITERAL_ESCAPES = ("\\n", "\\t")


def check_data(config: TrainingConfig) -> None:
    """Raises ConfigError where data flags are missing or do not fit together."""
    data = config.data
    rl = isinstance(config, PPOConfig)
    group, dataset, probs = (
        ("prompt", data.prompt_dataset, data.prompt_probs) if rl else ("dataset", data.dataset, data.dataset_probs)
    )
    dataset_flag = "--data.prompt_dataset" if rl else "--data.dataset"
    names = split_names(dataset or "")
    if not names:
        raise ConfigError(f"{dataset_flag} is missing: give a file, a folder or a hub name, or several with commas.")
    mixing_weights(probs, len(names), f"--data.{group}_probs")
    check_template(data, type(data)().input_template)
    if config.eval.steps > 0 and not config.eval.dataset:
        raise ConfigError("--eval.steps is set without --eval.dataset; name what to evaluate on, or leave it out.")
    if isinstance(config, SFTConfig):
        check_sft(config)
    if isinstance(config, RMConfig | DPOConfig):
        check_pair_columns(data.prompt_key, data.chosen_key, data.rejected_key)
    if rl and data.max_len <= (config.rollout.max_new_tokens or 0):
        raise ConfigError(
            f"--rollout.max_new_tokens {config.rollout.max_new_tokens} leaves no room for a prompt in --data.max_len "
            f"{data.max_len}, which counts both; raise --data.max_len."
        )


def check_slots(template: str) -> None:
    """Raises ConfigError for a template that does not have exactly one slot: it would lose the prompt, or repeat it."""
    slots = template.count(SLOT)
    if slots != 1:
        raise ConfigError(
            f"--data.input_template has {slots} slots {SLOT} and needs exactly one, where the prompt goes in; found "
            f"{template!r}."
        )


def check_template(data: CorpusConfig, default: str | None) -> None:
    """Raises ConfigError where a prompt would not appear in its template, or two templates are given.

    Args:
        default: the template of a command line that names none; a chat template replaces it silently.
    """
    template = data.input_template
    if template is None or template == default:
        return
    check_slots(template)
    if data.apply_chat_template:
        raise ConfigError(
            "--data.input_template and --data.apply_chat_template are two ways to render a prompt; keep one."
        )


def template_notes(data: CorpusConfig) -> list[str]:
    """Returns: a warning for each escape of the shell's that reaches the model as two characters."""
    return [
        f"--data.input_template holds a literal {escape} (two characters), which the model sees as it stands: "
        f"{data.input_template!r}; in bash, write $'...' around the template to get the real character."
        for escape in LITERAL_ESCAPES
        if escape in (data.input_template or "")
    ]


def check_sft(config: SFTConfig) -> None:
    """Raises ConfigError where no response to train on is named."""
    data, pretrain = config.data, config.model.pretrain_mode_enable
    if data.multiturn and pretrain:
        raise ConfigError(
            "--data.multiturn trains on answers and --model.pretrain_mode_enable on everything; keep one."
        )
    check_response(data.output_key, chat=data.apply_chat_template, multiturn=data.multiturn, pretrain=pretrain)


def check_response(output_key: str | None, *, chat: bool, multiturn: bool, pretrain: bool) -> None:
    """Raises ConfigError where nothing tells the response from the prompt; each argument is the flag of its name."""
    if multiturn and not chat:
        raise ConfigError(
            "--data.multiturn finds the answers through the chat template; add --data.apply_chat_template."
        )
    if output_key is None and not chat and not pretrain:
        raise ConfigError(
            "--data.output_key is missing: name the column of the response, or give conversations with "
            "--data.apply_chat_template, or train on all text with --model.pretrain_mode_enable."
        )


def check_pair_columns(prompt_key: str | None, chosen_key: str, rejected_key: str) -> None:
    """Raises ConfigError where two of the columns of a pair are one; each argument is the flag of its name."""
    named = [("prompt_key", prompt_key), ("chosen_key", chosen_key), ("rejected_key", rejected_key)]
    for place, (flag, key) in enumerate(named):
        for other, same in named[place + 1 :]:
            if key == same:
                raise ConfigError(
                    f"--data.{flag} and --data.{other} both name the column {key!r}; each needs a column of its own."
                )
