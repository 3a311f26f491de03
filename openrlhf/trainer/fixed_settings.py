"""What a run that goes on from a state must share with the one that wrote it, to be read before any weight is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openrlhf.config import ConfigError

FIXED_FILE = "fixed.json"

# What a state had that names other flags but not this one, by the end of the flag: it was the only choice then.
ONLY_CHOICE = {"optim": "adam", "ds.lora.rank": 0}


def write_fixed(state: Path, fixed: Mapping[str, Any]) -> None:
    """Says in the state what a run that goes on from it must share. Raises: OSError."""
    beside = state / f"{FIXED_FILE}.partial"
    beside.write_text(json.dumps(dict(fixed)) + "\n")
    beside.replace(state / FIXED_FILE)


def read_fixed(state: Path) -> dict[str, Any]:
    """Returns: what ``write_fixed`` said; nothing where it is missing or broken: the state itself holds the same."""
    try:
        found = json.loads((state / FIXED_FILE).read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def refuse_other_settings(state: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Compares what two runs must share, by flag; a flag that ``there`` does not name is no difference, unless there
    was no choice when it was written.

    Raises: ConfigError, naming the first flag that differs.
    """
    for flag, value in _plain(here).items():
        only = next((was for end, was in ONLY_CHOICE.items() if flag.endswith(end)), value) if there else value
        written = _plain(there).get(flag, only)
        if written != value:
            raise ConfigError(
                f"--ckpt.load_enable: {state} was written with {flag} {written}, and this run has {value}: resume with "
                "the same, or start anew without the flag, in another --ckpt.path."
            )


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Values as a file gives them back."""
    return json.loads(json.dumps(dict(settings)))
