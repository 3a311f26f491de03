"""Command lines into configs. Parsing only: nothing is refused here for what it means."""

from __future__ import annotations

from collections.abc import Sequence

import tyro

from openrlhf.config.commands import COMMANDS, Config


def parse(command: str, argv: Sequence[str]) -> Config:
    """Reads the flags of a command.

    Args:
        command: a key of ``COMMANDS``.
        argv: the words after the command's name.

    Returns: the command's config as given, unchecked and unresolved.
    """
    return tyro.cli(COMMANDS[command], prog=f"openrlhf {command}", args=list(argv), use_underscores=True)
