"""Writes prompts of a reasoning-gym task as JSON lines: `prompt`, and as `label` the whole entry that the scorer needs.

    python make_data.py outputs/smollm2 outputs/sums.jsonl

The task is `basic_arithmetic` with two numbers up to 10. The chat template renders the question as reasoning-gym puts
it, and the answer is begun with the bare sum ("5 + 9 ="), which belongs to the prompt: the model goes on from there.
Without that beginning this small model talks about the question; with it, about one answer in two starts with the
right number, but most go on talking. The scorer gives 1 for the number alone, the number's share of the text where
more stands beside it, and 0 where the number is wrong.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import reasoning_gym
from transformers import AutoTokenizer

TASK = "basic_arithmetic"
SETTINGS: dict[str, Any] = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 1,
    "operators": ("+", "-"),
    "allow_parentheses": False,
    "allow_negation": False,
}
ROWS, SEED = 1024, 1


def main() -> None:
    """Command line: the model's folder, for its chat template, and the file to write."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    path = Path(sys.argv[2])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for entry in reasoning_gym.create_dataset(TASK, size=ROWS, seed=SEED, **SETTINGS):
            file.write(json.dumps({"prompt": render(tokenizer, entry), "label": entry}) + "\n")
    print(f"{ROWS} prompts in {path}")


def render(tokenizer: Any, entry: dict[str, Any]) -> str:
    """Returns: the question in the chat template, and the beginning of its answer."""
    messages = [{"role": "user", "content": entry["question"]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return f"{text}{entry['metadata']['expression']} ="


if __name__ == "__main__":
    main()
