"""The states of an RL run: the actor's and the critic's, which belong together step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openrlhf.backends.checkpoints import CheckpointStore, refuse_other_run
from openrlhf.config import PPOCkptConfig
from openrlhf.trainer.best import NONE
from openrlhf.trainer.fixed_settings import read_fixed, refuse_other_settings
from openrlhf.trainer.supervised_outputs import locked

# In an actor's state: its weights were evaluated after it had been written.
EVALUATED_FILE = "evaluated"


class RLStates:
    """What stands under --ckpt.path: ``_actor``, ``_critic`` and the exported policies. Needs no worker."""

    def __init__(self, ckpt: PPOCkptConfig, *, has_critic: bool) -> None:
        """Args: ``has_critic``: an actor's state needs a critic's of the same step beside it."""
        path = Path(ckpt.path)
        limits = {"max_num": ckpt.max_num, "max_mem_gb": ckpt.max_mem}
        self._ckpt = ckpt
        self._has_critic = has_critic
        self.actor = CheckpointStore(path / "_actor", **limits, exports=path)
        self.critic = CheckpointStore(path / "_critic", **limits)

    def to_resume(self) -> Path | None:
        """Returns: the actor's state that the run goes on from; None where it starts at its first step."""
        return self._latest() if self._ckpt.load_enable else None

    def _latest(self) -> Path | None:
        critic = {path.name for path in self.critic.complete()}
        states = [path for path in self.actor.complete() if not self._has_critic or path.name in critic]
        return states[-1] if states else None

    def critic_of(self, state: Path) -> Path:
        """Returns: where the critic's state beside ``state`` of the actor stands."""
        return self.critic.root / state.name

    def check(self, fixed: Mapping[str, Any]) -> None:
        """To be asked before anything is started.

        Args:
            fixed: by flag, what a resumed run must share with the one it goes on from.

        Raises:
            ConfigError: the run that is to go on had other settings; or this one starts at its first step and saves
                where another has left checkpoints.
            OSError: a state cannot be read.
        """
        state = self.to_resume()
        if state is not None:
            refuse_other_settings(state, read_fixed(state), fixed)
        elif self._ckpt.save_steps > 0:
            # A critic alone is what a run leaves that was killed in its first save. Where runs are started again until
            # they are done, with --ckpt.load_enable, it has to be no obstacle.
            stores = [self.actor] if self._ckpt.load_enable else [self.actor, self.critic]
            refuse_other_run(self._ckpt.path, stores, resumable=self._latest() is not None)

    def mark_evaluated(self, step: int) -> None:
        """Says in the state of ``step``, where there is one, that its weights were evaluated. Raises: OSError."""
        for state in self.actor.complete():
            if state == self.actor.folder(step):
                (state / EVALUATED_FILE).touch()

    def go_on_after(self, step: int) -> None:
        """Tells that the run goes on from ``step``, 0 for a new one; see ``CheckpointStore.go_on_after``."""
        self.actor.go_on_after(step)
        self.critic.go_on_after(step)

    def sweep(self) -> None:
        """Removes, before a save, what killed runs left behind."""
        self.actor.sweep()
        if self._has_critic:
            self.critic.sweep()

    def prune(self, *, keep: int | None = None) -> None:
        """Removes, after a save, the oldest checkpoints beyond the limits, which hold for both models together.

        Args: ``keep``: a step whose checkpoint stays.
        """
        self.actor.prune(beside=[self.critic] if self._has_critic else [], keep=keep)


def was_evaluated(state: Path) -> bool:
    """Returns: whether ``mark_evaluated`` was told of the state."""
    return (state / EVALUATED_FILE).exists()


@contextmanager
def sole_run(
    ckpt: PPOCkptConfig,
    fixed: Mapping[str, Any],
    warn: Callable[[str], None],
    *,
    has_critic: bool,
    evaluates: bool,
) -> Iterator[None]:
    """While it lasts, no other run writes into the folders of this one.

    Args:
        fixed: by flag, what a resumed run must share with the one it goes on from.
        evaluates: the best model of the evaluations is kept under --ckpt.path, unless no metric is to choose it.

    Raises:
        ConfigError: another run holds a folder, or has left states there that this one cannot go on from.
        OSError: a folder cannot be made, or a state cannot be read.
    """
    with locked(ckpt, warn, keeps_best=evaluates and ckpt.best_metric_key != NONE):
        RLStates(ckpt, has_critic=has_critic).check(fixed)
        yield
