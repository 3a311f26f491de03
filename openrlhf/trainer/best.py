"""Which evaluation was the best so far, where its model is kept, and which state is of the best one."""

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
        # The last evaluation, and the best of those whose step has a checkpoint.
        self._last: dict[str, Any] | None = None
        self._kept: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Returns: the best evaluation so far."""
        return {"name": self._name, "best": self._best, "kept": self._kept}

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        """Goes to where ``state`` was taken, unless another metric is asked for now.

        Returns: a sentence where the best model so far is forgotten, since it is that of another metric.
        """
        name = state["name"]
        if name is not None and self._key and self._key not in (name, name.replace("/", "_")):
            return (
                f"--ckpt.best_metric_key {self._key}: the best model so far is that of {name}, which counts no longer"
            )
        self._name, self._best, self._kept = name, state["best"], state.get("kept")
        return None

    def checkpoint_to_keep(self, step: int) -> int | None:
        """To be asked before the checkpoint of ``step`` is written.

        Returns: of this and all earlier checkpoints the step whose evaluation was the best, the later one of equals;
            None where none was evaluated.
        """
        last = self._last
        if last is not None and last["step"] == step and (self._kept is None or last["value"] >= self._kept["value"]):
            self._kept = last
        return None if self._kept is None else self._kept["step"]

    def improves(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Takes an evaluation. Returns: whether it is the best so far; of equal ones the later, which has trained on.

        One without the metric (nothing of it could be scored) is passed over.

        Raises: ConfigError, where the first evaluation has no such metric.
        """
        if self._name is None:
            self._name = self._metric(metrics)
        value = math.nan if self._name is None else metrics.get(self._name, math.nan)
        if math.isnan(value):
            return False
        self._last = {"metric": self._name, "value": value, "step": step}
        if self._best is not None and value < self._best["value"]:
            return False
        self._best = self._last
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
