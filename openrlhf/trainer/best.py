"""Which evaluation was the best so far, and where its model is kept."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openrlhf.config import ConfigError

NONE = "none"
BEST_FILE = "best.json"

_PASS1, _REWARD = re.compile(r"eval/.*_pass1"), re.compile(r"eval/.*_reward")


class BestModel:
    """Watches one metric of the evaluations; the higher the better."""

    def __init__(self, key: str, folder: Path) -> None:
        """
        Args:
            key: --ckpt.best_metric_key: a metric, with "/" or "_" after "eval"; empty takes the first pass1, or
                else the first reward; "none" keeps nothing.
            folder: of the exported model.
        """
        self._key = key
        self.folder = folder
        # Settled by the first evaluation: the best of two metrics would be none of either.
        self._name: str | None = None
        self._best: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Returns: the best evaluation so far."""
        return {"name": self._name, "best": self._best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to where ``state`` was taken."""
        self._name, self._best = state["name"], state["best"]

    def improves(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Takes an evaluation. Returns: whether it is the best so far; of equal ones the first.

        One without the metric (nothing of it could be scored) is passed over.

        Raises: ConfigError, where the first evaluation has no such metric.
        """
        if self._name is None:
            self._name = self._metric(metrics)
        value = math.nan if self._name is None else metrics.get(self._name, math.nan)
        if math.isnan(value) or (self._best is not None and value <= self._best["value"]):
            return False
        self._best = {"metric": self._name, "value": value, "step": step}
        return True

    def forget(self) -> None:
        """Before another model takes the place of the one that is described there."""
        (self.folder / BEST_FILE).unlink(missing_ok=True)

    def write(self) -> None:
        """Says beside the model what it is the best of."""
        (self.folder / BEST_FILE).write_text(json.dumps(self._best) + "\n")

    def _metric(self, metrics: Mapping[str, float]) -> str | None:
        found = [name for name in metrics if name.startswith("eval/")]
        if self._key == NONE:
            return None
        if not self._key:
            # The scores of reward models are no pass rates; the reward is what there is then.
            likely = [name for kind in (_PASS1, _REWARD) for name in found if kind.fullmatch(name)]
            return likely[0] if likely else None
        for name in found:
            if self._key in (name, name.replace("/", "_")):
                return name
        if all(name.endswith("_failed") for name in found):
            # Nothing could be scored, which says nothing about the key.
            return None
        raise ConfigError(
            f"--ckpt.best_metric_key {self._key}: the evaluation has no such metric; it has {', '.join(found)}."
        )
