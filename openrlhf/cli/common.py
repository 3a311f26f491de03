"""What every command does: read its flags, check them, call one function."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Sequence

from openrlhf.config import ConfigError, check, check_device, device_notes, known_device, notes, parse, resolve
from openrlhf.config.commands import Config, TrainingConfig
from openrlhf.config.parse import print_note
from openrlhf.data.errors import DataError
from openrlhf.utils.errors import RunError

USER_ERRORS = (ConfigError, DataError)

# Seconds that a silent rank leaves the speaking one to say what is wrong.
SPEAKER_S = 2.0


def run_command(command: str, target: str | None, argv: Sequence[str] | None = None) -> None:
    """Runs a command from its flags.

    A mistake of the user's ends in one sentence on stderr and exit status 2, a run that cannot go on in one and exit
    status 1, anything else in its traceback.

    Args:
        command: its name.
        target: ``module:function`` that gets the config; None for a command that the checks refuse.
        argv: flags; None takes the process's own.
    """
    words = sys.argv[1:] if argv is None else argv
    try:
        config = prepare(command, words)
        if isinstance(config, TrainingConfig) and config.dry_run:
            _call("openrlhf.trainer.dry_run:run", config)
            return
    except USER_ERRORS as error:
        # All ranks of a launcher find the same, and one of each node says it. The others wait for it, because a
        # launcher ends all as soon as one is gone.
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            _complain(command, error)
        else:
            time.sleep(SPEAKER_S)
        sys.exit(2)
    try:
        _call(str(target), config)
    except USER_ERRORS as error:
        _complain(command, error)
        sys.exit(2)
    except RunError as error:
        _complain(command, error)
        sys.exit(1)


def prepare(command: str, argv: Sequence[str]) -> Config:
    """Returns: the checked and resolved config of a command line; what deserves a look is printed.

    Raises: ConfigError.
    """
    config = parse(command, argv)
    check(config)
    found = notes(config)
    if isinstance(config, TrainingConfig):
        device = known_device(config)
        if device is not None:
            check_device(config, device)
            found += device_notes(config, device)
    for note in found:
        print_note(note)
    return resolve(config)


def _call(target: str, config: Config) -> None:
    module, _, function = target.partition(":")
    vars(importlib.import_module(module))[function](config)


def _complain(command: str, error: Exception) -> None:
    # Ray wraps what a worker raised; the sentence stands in its cause.
    cause = error.__dict__.get("cause")
    print(f"openrlhf {command}: {cause if isinstance(cause, USER_ERRORS) else error}", file=sys.stderr)
