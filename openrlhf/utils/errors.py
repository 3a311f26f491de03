"""Errors that a command reports in one sentence."""

from __future__ import annotations


class RunError(RuntimeError):
    """The run cannot go on; the message names the worker and the cause."""
