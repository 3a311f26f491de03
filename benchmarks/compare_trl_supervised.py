"""SFT and DPO on a CPU, here and in TRL: the same numbers step by step, then tokens a second.

    python -m venv trl_venv && trl_venv/bin/pip install torch trl datasets
    python -m benchmarks.compare_trl_supervised losses --trl_python trl_venv/bin/python
    python -m benchmarks.compare_trl_supervised speed --trl_python trl_venv/bin/python

``losses`` trains a random model for 20 steps on both sides in fp32 and compares loss, gradient norm, learning rate and
the weights that come out. It ends with 1 where a case is not as it is known to be. ``speed`` takes turns; nothing else
should run on the machine. Both write results.json and print a table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.supervised_cases import CASES
from benchmarks.supervised_losses import compare_losses, losses_table
from benchmarks.supervised_speed import SPEED_CASES, Load, compare_speed, speed_table


def main() -> None:
    """Runs one of the two comparisons."""
    args = _arguments()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    if args.what == "losses":
        result = compare_losses(args.cases, args.output_dir.absolute(), args.trl_python, steps=args.steps)
        print("\n" + losses_table(result["cases"]))
    else:
        load = Load(args.steps, args.batch, tuple(args.characters), args.warmup, args.rounds)
        result = compare_speed(args.cases, args.output_dir.absolute(), args.trl_python, load, args.model)
        print("\n" + speed_table(result["cases"]))
    (args.output_dir / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    surprises = [name for name, case in result["cases"].items() if case.get("as_known") is False]
    if surprises:
        raise SystemExit(f"not as known: {', '.join(surprises)}")


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    losses = parts.add_parser("losses", help="are the numbers of both sides the same?")
    losses.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    losses.add_argument("--steps", type=int, default=20)
    speed = parts.add_parser("speed", help="tokens a second of both sides")
    speed.add_argument("--cases", nargs="+", choices=list(SPEED_CASES), default=list(SPEED_CASES))
    speed.add_argument("--model", type=Path, help="a model's folder; a random one of 28 million parameters where unset")
    speed.add_argument("--steps", type=int, default=4)
    speed.add_argument("--warmup", type=int, default=1, help="first steps of each run that are left out")
    speed.add_argument("--rounds", type=int, default=2, help="runs of each side")
    speed.add_argument("--batch", type=int, default=8, help="rows of a step, or twice its pairs")
    speed.add_argument("--characters", type=int, nargs=2, default=(60, 300), help="of a row, fewest and most")
    for part in (losses, speed):
        part.add_argument("--trl_python", required=True, help="the Python that has trl")
        part.add_argument("--output_dir", type=Path, default=Path("outputs/compare_trl_supervised"))
    args = parser.parse_args()
    if args.what == "speed":
        if not 0 <= args.warmup < args.steps:
            parser.error(f"--warmup {args.warmup} leaves nothing of --steps {args.steps}: take fewer, or more steps")
        if args.batch < 4 or args.batch % 4:
            parser.error(
                f"--batch {args.batch} has to be a multiple of 4, which makes micro-batches of a quarter of it"
            )
        if args.model is not None and not (args.model / "config.json").is_file():
            parser.error(f"--model {args.model} is no model folder")
    elif args.steps < 1:
        parser.error(f"--steps {args.steps} compares nothing: take 1 or more")
    return args


if __name__ == "__main__":
    main()
