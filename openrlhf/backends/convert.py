"""Converts a state ahead for another number of ranks.

A run with --ds.use_universal_ckpt does the same when it resumes; ahead, no GPU waits for it.
"""

from __future__ import annotations

import json
from pathlib import Path

from openrlhf.backends.checkpoint_files import TAG
from openrlhf.backends.checkpoints import COMPLETE, CheckpointStore
from openrlhf.backends.muon import MuonWithAdamW
from openrlhf.backends.universal import UNIVERSAL, convert_to_universal, is_whole
from openrlhf.config.errors import ConfigError


def newest_states(folder: Path) -> list[Path]:
    """Args: folder: a state (``global_step<N>``), or what --ckpt.path named.

    Returns: the state, or the newest one of each model.

    Raises: ConfigError where there is none.
    """
    if (folder / COMPLETE).is_file():
        return [folder]
    alone, actor, critic = (
        CheckpointStore(root, max_num=1, max_mem_gb=1).complete()
        for root in (folder, folder / "_actor", folder / "_critic")
    )
    # RL goes on from a step that both have: a killed save leaves the critic's alone.
    pairs = [(a, c) for a in actor for c in critic if a.name == c.name]
    states = [*alone[-1:], *(pairs[-1] if pairs else actor[-1:])]
    if not states:
        raise ConfigError(f"{folder} holds no complete state: name a global_step folder, or the folder of --ckpt.path")
    return states


def convert(state: Path) -> str:
    """Converts one state, inside its folder.

    Returns: a sentence about what was done.

    Raises:
        ConfigError: Muon has written it.
        OSError: the state cannot be read, or nothing can be written there.
        RuntimeError: DeepSpeed's converter failed.
    """
    layout = json.loads((state / COMPLETE).read_text())
    if layout.get("optimizer") == MuonWithAdamW.__name__:
        raise ConfigError(
            f"{state} was written with --optim muon, whose state cannot be converted: the converter knows Adam's alone"
        )
    if layout["ZeRO stage"] == 0:
        return f"{state} needs no conversion: without ZeRO nothing is split over ranks"
    if is_whole(state / UNIVERSAL):
        return f"{state} is converted already"
    convert_to_universal(state / TAG, state / UNIVERSAL)
    return f"{state} is converted: go on from it on any number of ranks with --ckpt.load_enable --ds.use_universal_ckpt"
