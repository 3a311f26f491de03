"""The console command: openrlhf COMMAND [flags]."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

import openrlhf

COMMANDS = {
    "quickstart": "make a small model and teach it to add, in minutes on a CPU",
    "train_sft": "supervised fine-tuning",
    "train_ppo_ray": "reinforcement learning with Ray, vLLM and DeepSpeed",
    "train_rm": "reward model training",
    "train_dpo": "direct preference optimisation",
    "lora_combiner": "merge a LoRA adapter into its base model",
    "serve_rm": "serve a reward model over HTTP",
    "zero_to_universal": "convert a training state for another number of ranks",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command that the first word names; without one, lists them."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return
    if words[0] == "--version":
        print(openrlhf.__version__)
        return
    command = words[0].replace("-", "_")
    if command not in COMMANDS:
        begun = [name for name in COMMANDS if name.startswith(command)]
        close = begun or difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(COMMANDS)}."
        print(f"openrlhf: unknown command {words[0]!r}; {hint}", file=sys.stderr)
        sys.exit(2)
    importlib.import_module(f"openrlhf.cli.{command}").main(words[1:])


def usage() -> str:
    """Returns: the list of commands."""
    rows = [f"  {name:<19}{what}" for name, what in COMMANDS.items()]
    head = "usage: openrlhf COMMAND [flags]        openrlhf COMMAND --help lists the flags"
    return "\n".join([head, "", *rows])


if __name__ == "__main__":
    main()
