"""Commands as they stand in published guides parse unchanged."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from openrlhf.config import command_of, parse

TEXT = (Path(__file__).parents[1] / "data/spec_commands.txt").read_text()
BLOCKS = TEXT.split("\n====\n")

# A launcher's name prints the words that it was given, so that the shell itself splits the command.
SHOW = "\n".join(f"{name}() {{ printf '%s\\0' \"$@\"; }}" for name in ("deepspeed", "python", "python3", "ray"))


def split_command(block: str) -> tuple[str, list[str]]:
    """Returns: our command's name and its words, as bash reads them. Lines of dots stand for further flags."""
    script = re.sub(r"^\s*\.\.\.$", r"\\", block, flags=re.MULTILINE).rstrip().removesuffix("\\")
    out = subprocess.run(
        ["bash", "-c", f"{SHOW}\n{script}"], capture_output=True, text=True, check=True, timeout=20
    ).stdout
    words = out.split("\0")[:-1]
    module = next(i for i, word in enumerate(words) if word.startswith("openrlhf.cli."))
    return words[module].removeprefix("openrlhf.cli."), words[module + 1 :]


def options(block: str) -> list[list[str]]:
    """Returns: the words of each option that stands behind the command as a comment."""
    return [line[2:].split() for line in block.splitlines() if line.startswith("# --")]


COMMANDS = [split_command(block) for block in BLOCKS]
OPTIONS = [
    (command, words + extra)
    for (command, words), block in zip(COMMANDS, BLOCKS, strict=True)
    for extra in options(block)
]


def quiet(command: str, words: list[str]):
    return parse(command, words, note=lambda text: None)


def test_all_printed_commands_and_their_options_are_here():
    assert [command for command, _ in COMMANDS] == [
        "train_sft", "train_rm", "train_ppo_ray", "train_ppo_ray", "train_ppo_ray", "train_ppo_ray", "lora_combiner",
    ]  # fmt: skip
    assert len(OPTIONS) == 18


@pytest.mark.parametrize(
    ("command", "words"), COMMANDS + OPTIONS, ids=lambda value: value if isinstance(value, str) else value[-1]
)
def test_printed_command_parses(command, words):
    assert command_of(quiet(command, words)) == command


def test_printed_sft_command_means_what_it_says():
    config = quiet(*COMMANDS[0])

    assert config.model.model_name_or_path == "meta-llama/Meta-Llama-3-8B"
    assert config.model.gradient_checkpointing_enable
    assert config.data.input_template == "User: {}\nAssistant: "
    assert config.optimizer.adam.lr == 5e-6
    assert config.eval.steps == config.ckpt.save_steps == -1
    assert config.logger.wandb.key == "{wandb_token}"


def test_printed_reward_model_command_means_what_it_says():
    config = quiet(*COMMANDS[1])

    assert (config.data.chosen_key, config.data.rejected_key) == ("chosen", "rejected")
    assert config.model.model_name_or_path == "OpenRLHF/Llama-3-8b-sft-mixture"
    assert config.ds.zero_stage == 3


def test_printed_rl_command_means_what_it_says():
    config = quiet(*COMMANDS[2])

    assert config.data.max_len == 2048
    assert config.rollout.max_new_tokens == 1024
    assert config.train.colocate_all and config.train.dynamic_batch_enable
    assert config.vllm.num_engines * config.vllm.tensor_parallel_size == 8
    assert (config.actor.optimizer.adam.lr, config.critic.optimizer.adam.lr) == (5e-7, 9e-6)


def test_printed_merge_command_means_what_it_says():
    config = quiet(*COMMANDS[6])

    assert config.is_rm and config.ds.param_dtype == "bf16"
    assert config.lora_path == "./checkpoint/llama3-8b-rm"
