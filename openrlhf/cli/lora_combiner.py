"""Merges a LoRA adapter into its base model."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.cli.common import run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command from its flags; None takes the process's own."""
    run_command("lora_combiner", "openrlhf.trainer.lora_combiner:run", argv)


if __name__ == "__main__":
    main()
