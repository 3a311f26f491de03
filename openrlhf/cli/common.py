"""What every command does: read its flags, check them, call one function."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from openrlhf.config import (
    ConfigError,
    check,
    check_device,
    check_serve_device,
    device_notes,
    known_device,
    notes,
    parse,
    resolve,
    settle_device,
)
from openrlhf.config.commands import Config, ServeRMConfig, TrainingConfig
from openrlhf.config.flags import flags_of
from openrlhf.config.parse import print_note
from openrlhf.data.errors import DataError
from openrlhf.utils.errors import RunError
from openrlhf.utils.termination import EXIT_STATUS, Terminated, raise_on_sigterm, was_told_to_end

USER_ERRORS = (ConfigError, DataError)

# Seconds that a silent rank leaves the speaking one to say what is wrong.
SPEAKER_S = 2.0


def run_command(command: str, target: str | None, argv: Sequence[str] | None = None) -> None:
    """Runs a command from its flags.

    A mistake of the user's ends in one sentence on stderr and exit status 2, a run that cannot go on in one and exit
    status 1, Ctrl-C and SIGTERM in one and the status that a shell gives them (130, 143), anything else in its
    traceback.

    Args:
        command: its name.
        target: ``module:function`` that gets the config; None for a command that the checks refuse.
        argv: flags; None takes the process's own.
    """
    raise_on_sigterm()
    try:
        _run(command, target, sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt as stop:
        ended = isinstance(stop, Terminated) or was_told_to_end()
        how, status = ("terminated", EXIT_STATUS) if ended else ("interrupted", 130)
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            print(f"openrlhf {command}: {how}", file=sys.stderr, flush=True)
        sys.exit(status)


def _run(command: str, target: str | None, words: Sequence[str]) -> None:
    try:
        config = prepare(command, words)
        if isinstance(config, TrainingConfig):
            _call("openrlhf.trainer.preflight:run", config)
            if config.dry_run:
                _call("openrlhf.trainer.dry_run:run", config)
                return
    except USER_ERRORS as error:
        # Every rank has found the same, so none but the first of each node has anything to add.
        _leave(command, error, status=2, lone=False)
    try:
        _call(str(target), config)
    except USER_ERRORS as error:
        _leave(command, error, status=2)
    except Exception as error:
        if not isinstance(error, _run_errors()):
            raise
        _leave(command, error, status=1)


def prepare(command: str, argv: Sequence[str]) -> Config:
    """Returns: the checked and resolved config of a command line; what deserves a look is printed.

    Raises: ConfigError.
    """
    config = parse(command, argv)
    _hide_secrets(config)
    check(config)
    found = notes(config)
    if isinstance(config, TrainingConfig):
        config, settled = settle_device(config)
        found += settled
        device = known_device(config)
        if device is not None:
            check_device(config, device)
            found += device_notes(config, device)
    if isinstance(config, ServeRMConfig):
        check_serve_device(config)
    for note in found:
        print_note(note)
    return resolve(config)


def _hide_secrets(config: Config) -> None:
    """Takes secrets out of the process's command line, which W&B, among others, shows beside a run."""
    for flag in flags_of(type(config)).values():
        value = flag.value(config)
        if flag.hides(value):
            sys.argv[:] = [word.replace(value, "***") for word in sys.argv]


def _call(target: str, config: Config) -> None:
    module, _, function = target.partition(":")
    getattr(importlib.import_module(module), function)(config)


def _run_errors() -> tuple[type[Exception], ...]:
    """What ends a run in a sentence. Asked for once something was raised: these modules load torch."""
    from openrlhf.backends.deepspeed_backend import GradientError
    from openrlhf.backends.distributed import RankError
    from openrlhf.rollout.transfer import TransferError

    return RunError, RankError, GradientError, TransferError


def _leave(command: str, error: Exception, *, status: int, lone: bool = True) -> NoReturn:
    """Says what is wrong, once for all ranks of a node, and exits.

    A launcher ends all ranks as soon as one is gone, so the others leave the first one the time to speak. A rank that
    is still there after that was not heard: it may have met alone what is wrong.

    Args:
        lone: a rank may have met it alone.
    """
    rank = int(os.environ.get("LOCAL_RANK", 0))
    if rank:
        time.sleep(SPEAKER_S)
    if not rank or lone:
        who = f"{command} (local rank {rank})" if rank else command
        print(f"openrlhf {who}: {_sentence(error)}", file=sys.stderr, flush=True)
    sys.exit(status)


def _sentence(error: Exception) -> str:
    if not type(error).__module__.startswith("ray."):
        return str(error)
    from ray.exceptions import RayTaskError

    # An error of a worker: Ray's text is its traceback, and the sentence stands in the cause.
    return str(error.cause if isinstance(error, RayTaskError) else error)
