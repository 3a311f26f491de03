"""A config as a YAML file that `--config` reads back, without what is secret."""

from __future__ import annotations

from typing import Any

from openrlhf.config.commands import Config
from openrlhf.config.flags import flags_of

# What the file is called wherever one is written.
CONFIG_FILE = "config.yaml"

# They belong to one start of a run, not to the run.
_NOT_KEPT = ("config", "local_rank", "dry_run")


def to_flags_yaml(config: Config) -> str:
    """Returns: every flag with its value, nested by group; ``--config`` on it gives the same config again.

    Secrets are left out and have to be given again: the file lies in exported models and checkpoints, stands in reports
    and goes to trackers.
    """
    import yaml

    tree: dict[str, Any] = {}
    for flag in flags_of(type(config)).values():
        value = flag.value(config)
        if flag.name in _NOT_KEPT or flag.hides(value):
            continue
        *groups, leaf = flag.name.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[leaf] = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
