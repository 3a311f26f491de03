"""Command lines into configs. Parsing only: nothing is refused here for what it means."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence

import tyro

from openrlhf.config.aliases import PROMPT_MAX_LEN
from openrlhf.config.commands import COMMANDS, Config
from openrlhf.config.errors import ConfigError
from openrlhf.config.flags import Flag, flags_of
from openrlhf.config.settings import Setting, from_words, from_yaml
from openrlhf.config.unbuilt import unbuilt_flags

_HELP_WIDTH = 100


def print_note(text: str) -> None:
    """Writes a note to stderr, once for all ranks that a launcher started."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"note: {text}", file=sys.stderr)


def parse(command: str, argv: Sequence[str], note: Callable[[str], None] = print_note) -> Config:
    """Reads the flags of a command, and the file of ``--config`` below them.

    Args:
        command: a key of ``COMMANDS``.
        argv: the words after the command's name.
        note: receives a sentence for every flag that was written in another spelling.

    Returns: the command's config as given, unchecked and unresolved.

    Raises: ConfigError for an unknown flag, a value of the wrong form, or a bad file.
    """
    tree = COMMANDS[command]
    if "-h" in argv or "--help" in argv:
        try:
            return _tyro(command, ["--help"])
        finally:
            if line := _unbuilt_line(command):
                print(line)
    flags = flags_of(tree)
    given = from_words(argv, flags)
    files = [setting for setting in given if setting.name == "config"]
    if len(files) > 1:
        raise ConfigError("--config is given twice; put everything into one file.")
    layers = [from_yaml(files[0].words[0], flags) if files else [], given]
    for setting in (setting for layer in layers for setting in layer):
        if setting.name != PROMPT_MAX_LEN and setting.written not in (setting.name, flags[setting.name].negative):
            name = flags[setting.name].negative if setting.words == ["False"] else setting.name
            note(f"{setting.origin} is read as --{name}.")
    return _tyro(command, _words(_join_lengths(layers, note), flags))


def _tyro(command: str, words: list[str]) -> Config:
    return tyro.cli(COMMANDS[command], prog=f"openrlhf {command}", args=words, use_underscores=True)


def _unbuilt_line(command: str) -> str:
    """What the help lists and a run would refuse; empty where it would refuse nothing."""
    names = " ".join(f"--{name}" for name in unbuilt_flags(COMMANDS[command]))
    if not names:
        return ""
    return textwrap.fill(
        f"Not built yet, and refused but for their defaults: {names}",
        _HELP_WIDTH,
        subsequent_indent="  ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _join_lengths(layers: list[list[Setting]], note: Callable[[str], None]) -> dict[str, Setting]:
    """Merges the layers, the later over the earlier, and turns a longest prompt into a longest row.

    The longest row is prompt and response together, so a longest prompt P beside G new tokens means P + G.
    """
    merged: dict[str, Setting] = {}
    for layer in layers:
        names = {setting.name for setting in layer}
        if PROMPT_MAX_LEN in names and "data.max_len" in names:
            raise ConfigError(
                "--prompt_max_len and --data.max_len are both given; --data.max_len counts prompt and response "
                "together, so keep it and drop --prompt_max_len."
            )
        for setting in layer:
            if setting.name == "data.max_len":
                merged.pop(PROMPT_MAX_LEN, None)
            merged[setting.name] = setting
    prompt = merged.pop(PROMPT_MAX_LEN, None)
    if prompt is None:
        return merged
    response = merged.get("rollout.max_new_tokens")
    if response is None or response.words == ["None"]:
        raise ConfigError(
            f"{prompt.origin} {prompt.words[0]} needs --generate_max_len as well: the two together make --data.max_len."
        )
    total = int(prompt.words[0]) + int(response.words[0])
    note(f"{prompt.origin} {prompt.words[0]} and {response.words[0]} new tokens are read as --data.max_len {total}.")
    merged["data.max_len"] = Setting("data.max_len", [str(total)], "data.max_len", prompt.origin)
    return merged


def _words(settings: Mapping[str, Setting], flags: Mapping[str, Flag]) -> list[str]:
    """Returns: one command line with every flag once, under its own name."""
    words = []
    for name, setting in settings.items():
        flag = flags[name]
        if flag.kind is bool:
            words.append(f"--{name if setting.words == ['True'] else flag.negative}")
        elif flag.nargs is None:
            words.append(f"--{name}={setting.words[0]}")
        else:
            words += [f"--{name}", *setting.words]
    return words
