"""Direct preference optimisation: deepspeed, torchrun or python, with --module or -m openrlhf.cli.train_dpo."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.cli.common import run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command from its flags; None takes the process's own."""
    run_command("train_dpo", "openrlhf.trainer.dpo:run", argv)


if __name__ == "__main__":
    main()
