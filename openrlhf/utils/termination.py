"""SIGTERM, which schedulers and launchers send, ends a run as Ctrl-C does: cleanups run, files are flushed."""

from __future__ import annotations

import signal
import threading
from types import FrameType

# What a shell reports of a process that SIGTERM ended.
EXIT_STATUS = 128 + signal.SIGTERM


class Terminated(KeyboardInterrupt):
    """SIGTERM came. What lets Ctrl-C through lets this through as well."""


def raise_on_sigterm() -> None:
    """From now on the first SIGTERM raises ``Terminated`` in the main thread, and later ones do nothing.

    To be called again after what takes the signal for itself, as ``ray.init`` does. Outside the main thread, where
    Python takes no signal, it does nothing.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _raise_once)


def was_told_to_end() -> bool:
    """Returns: whether SIGTERM has come. Ray makes a plain ``KeyboardInterrupt`` of what is raised while it waits."""
    return signal.getsignal(signal.SIGTERM) is _do_nothing


def _raise_once(number: int, frame: FrameType | None) -> None:
    # Not SIG_IGN, which processes that are started during the cleanup would inherit.
    signal.signal(signal.SIGTERM, _do_nothing)
    raise Terminated


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """A second one would break off the cleanup that the first has begun."""
