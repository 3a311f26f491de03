"""Where processes of tests meet that start groups of their own."""

from __future__ import annotations

import socket

import torch.distributed as dist


def free_port() -> int:
    """Returns: a TCP port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def open_store() -> dist.TCPStore:
    """Returns: a store on a port that the system chose, for as long as it is held."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
