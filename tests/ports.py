"""Ports for tests that start their own groups of processes."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Returns: a TCP port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
