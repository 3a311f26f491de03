"""Other spellings of flags that published commands use, and what they mean here."""

from __future__ import annotations

from collections.abc import Mapping

from openrlhf.config.flags import Flag

# spelling -> flag; a spelling counts only for commands that have the flag.
RENAMED: dict[str, str] = {
    "chosen_key": "data.chosen_key",
    "rejected_key": "data.rejected_key",
    "label_key": "data.label_key",
    "value_prefix_head": "ds.value_head_prefix",
    "ds.value_prefix_head": "ds.value_head_prefix",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "algo.dynamic_filtering": "algo.dynamic_filtering_enable",
    "generate_max_len": "rollout.max_new_tokens",
}

# Not the name of a flag: the longest prompt, which becomes a part of --data.max_len.
PROMPT_MAX_LEN = "prompt_max_len"


def is_group(name: str, flags: Mapping[str, Flag]) -> bool:
    """Returns: whether ``name`` is the beginning of flags' names, other spellings included."""
    if any(flag.startswith(f"{name}.") for flag in flags):
        return True
    return name == "actor" or (name.startswith("actor.") and is_group(name.removeprefix("actor."), flags))


def canonical(name: str, flags: Mapping[str, Flag]) -> str | None:
    """Finds the flag that a name stands for.

    Args:
        name: as written, without dashes in front, underscores inside.
        flags: the flags of the command.

    Returns: ``name`` itself, the flag it is another spelling of, or None.
    """
    if name in flags:
        return name
    if RENAMED.get(name) in flags:
        return RENAMED[name]
    if name.startswith("actor."):
        # The supervised commands have one model, whose flags stand under `model` and, for the optimizer, at the top.
        rest = name.removeprefix("actor.")
        return next((other for other in (f"model.{rest}", rest) if other in flags), None)
    return None
