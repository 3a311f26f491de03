"""A config as a YAML file that `--config` reads back."""

from __future__ import annotations

from typing import Any

from openrlhf.config.commands import Config
from openrlhf.config.flags import flags_of

# They belong to one start of a run, not to the run.
_NOT_KEPT = ("config", "local_rank", "dry_run")


def to_flags_yaml(config: Config) -> str:
    """Returns: every flag with its value, nested by group; ``--config`` on it gives the same config again."""
    import yaml

    tree: dict[str, Any] = {}
    for flag in flags_of(type(config)).values():
        if flag.name in _NOT_KEPT:
            continue
        *groups, leaf = flag.name.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        value = flag.value(config)
        node[leaf] = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
