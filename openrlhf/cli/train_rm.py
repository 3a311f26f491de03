"""Reward model training: deepspeed, torchrun or python, with --module or -m openrlhf.cli.train_rm."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.cli.common import run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command from its flags; None takes the process's own."""
    run_command("train_rm", "openrlhf.trainer.rm:run", argv)


if __name__ == "__main__":
    main()
