"""Reinforcement learning: python -m openrlhf.cli.train_ppo_ray, by itself or through ray job submit."""

from __future__ import annotations

import os
from collections.abc import Sequence

from openrlhf.cli.common import run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command from its flags; None takes the process's own."""
    # What each process of an engine says on the CPU before vLLM has set up its logging. Ray reads this when imported.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "Triton is installed, but doesn't include CPU backend")
    run_command("train_ppo_ray", "openrlhf.trainer.ppo:run", argv)


if __name__ == "__main__":
    main()
