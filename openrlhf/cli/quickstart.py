"""The quickstart: openrlhf quickstart --output_dir DIR."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import tyro

from openrlhf.config.errors import ConfigError
from openrlhf.config.quickstart import QuickstartConfig
from openrlhf.utils.termination import EXIT_STATUS, Terminated, raise_on_sigterm


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command from its flags; None takes the process's own."""
    try:
        config = tyro.cli(
            QuickstartConfig,
            prog="openrlhf quickstart",
            args=sys.argv[1:] if argv is None else list(argv),
            use_underscores=True,
        )
    except ConfigError as error:
        print(f"openrlhf quickstart: {error}", file=sys.stderr)
        sys.exit(2)
    raise_on_sigterm()
    from openrlhf.trainer.quickstart import CommandFailed, run

    try:
        run(config)
    except KeyboardInterrupt as error:
        print("openrlhf quickstart: ended before it was done", file=sys.stderr)
        sys.exit(EXIT_STATUS if isinstance(error, Terminated) else 130)
    except CommandFailed as error:
        print(f"openrlhf quickstart: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
