"""The task of the quickstart: sums of numbers below 50, a small model that can learn them, and a test of it."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

LIMIT = 50
PAD, USER, ASSISTANT, END, UNKNOWN = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>", "<|unknown|>"
SPECIAL = (PAD, USER, ASSISTANT, END, UNKNOWN)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MAX_ANSWER_TOKENS = 5


@dataclass(frozen=True)
class Problem:
    """One sum, in two digits each: ``question`` is "07+35=", ``answer`` is "42"."""

    question: str
    answer: str


@dataclass(frozen=True)
class Splits:
    """Problems to train on, and problems that training never sees."""

    train: list[Problem]
    held_out: list[Problem]


def make_problems(*, train: int, seed: int) -> Splits:
    """All sums of two numbers below 50, shuffled and split.

    Args:
        train: problems to train on; the rest is held out.
        seed: of the shuffle.
    """
    problems = [Problem(f"{a:02d}+{b:02d}=", f"{a + b:02d}") for a in range(LIMIT) for b in range(LIMIT)]
    if not 0 < train < len(problems):
        raise ValueError(f"cannot train on {train} of {len(problems)} problems and hold some out")
    random.Random(seed).shuffle(problems)
    return Splits(problems[:train], problems[train:])


def write_problems(path: Path, problems: Sequence[Problem]) -> Path:
    """Writes one JSON object a line with ``question`` and ``answer``. Returns: ``path``."""
    lines = [json.dumps({"question": p.question, "answer": p.answer}) + "\n" for p in problems]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each printable ASCII character, and a chat template."""
    characters = [*string.printable.rstrip("\t\r\x0b\x0c"), "\n"]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys([*SPECIAL, *characters]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(folder: Path, *, seed: int) -> int:
    """Writes a random model of Qwen3's shape with its tokenizer, as any Hugging Face folder.

    Returns: its number of parameters.
    """
    tokenizer = make_tokenizer()
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def accuracy(folder: Path, problems: Sequence[Problem], batch_size: int = 256) -> float:
    """The share of problems that a model answers right, with transformers alone and without sampling.

    Args:
        folder: a Hugging Face folder with model and tokenizer.
        problems: to ask.
        batch_size: prompts of one batch.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    right = 0
    for start in range(0, len(problems), batch_size):
        batch = problems[start : start + batch_size]
        chats = [[{"role": "user", "content": problem.question}] for problem in batch]
        texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
        answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=False)
        right += sum(a.startswith(p.answer + END) for a, p in zip(answers, batch, strict=True))
    return right / len(problems)
