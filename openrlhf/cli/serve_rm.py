"""Serves a reward model over HTTP: openrlhf serve_rm, or python -m openrlhf.cli.serve_rm."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.cli.common import run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command from its flags; None takes the process's own."""
    run_command("serve_rm", "openrlhf.serve.server:run", argv)


if __name__ == "__main__":
    main()
