"""How a list of data sets and its weights are written."""

from __future__ import annotations

from pathlib import Path

from openrlhf.config.errors import ConfigError


def split_names(spec: str) -> list[str]:
    """Returns: the data sets of a comma-separated list, blanks taken off; a path that exists is one, commas and all."""
    if spec.strip() and Path(spec.strip()).expanduser().exists():
        return [spec.strip()]
    return [name.strip() for name in spec.split(",") if name.strip()]


def mixing_weights(probs: str | None, sets: int, flag: str) -> list[float] | None:
    """Reads the weights with which data sets are mixed.

    Args:
        probs: comma-separated numbers; None or blank where nothing is mixed.
        sets: how many data sets there are.
        flag: names ``probs`` in a message.

    Returns: one weight for each set, scaled to sum to 1, or None.

    Raises: ConfigError where they are no numbers above 0, or not one for each set.
    """
    if probs is None or not probs.strip():
        return None
    try:
        weights = [float(part) for part in probs.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"{flag} takes numbers with commas between them, such as 0.1,0.9, found {probs!r}.") from None
    if len(weights) != sets:
        raise ConfigError(f"{flag} {probs!r} holds {len(weights)} numbers for {sets} data sets; give one for each.")
    if not all(0 < weight < float("inf") for weight in weights):
        raise ConfigError(f"{flag} takes numbers above 0, found {probs!r}; leave out a data set that is not wanted.")
    return [weight / sum(weights) for weight in weights]
