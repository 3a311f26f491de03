"""Converts a training state for another number of ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> None:
    """Converts what the command line names. Exits with status 2 and one sentence where that is not possible."""
    parser = argparse.ArgumentParser(prog="openrlhf zero_to_universal", description=__doc__)
    parser.add_argument("folder", type=Path, help="a state (global_step<N>), or the folder of --ckpt.path")
    folder = parser.parse_args(argv).folder
    # Here, so that --help does not wait for PyTorch.
    from openrlhf.backends.convert import convert, newest_states
    from openrlhf.config.errors import ConfigError
    from openrlhf.utils.termination import EXIT_STATUS, Terminated, raise_on_sigterm

    # Otherwise the converter's processes would outlive this one.
    raise_on_sigterm()
    try:
        for state in newest_states(folder):
            print(convert(state), flush=True)
    except Terminated:
        sys.exit(EXIT_STATUS)
    except (ConfigError, OSError, RuntimeError, ValueError) as error:
        print(f"error: converting {folder}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
