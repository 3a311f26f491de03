"""On which device models run."""

from __future__ import annotations

import torch


def choose_device(wanted: str) -> str:
    """Returns: "cuda" or "cpu" for ``--device``."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted
