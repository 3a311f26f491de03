"""A whole RL step on one GPU: a random model of 0.39 billion parameters, 512 samples of about 100 + 500 tokens.

    python benchmarks/rl_step.py --output_dir outputs/rl_step
    python benchmarks/rl_step.py --output_dir outputs/plain --settings plain
    python benchmarks/rl_step.py --output_dir outputs/two --settings two_engines --steps 8
    python benchmarks/rl_step.py --output_dir outputs/toy --size toy --steps 3 -- --device cpu

Trains `reinforce_baseline` with a KL to a reference in the loss, four updates a step, engine and models in turns on the
card. "plain" has small micro-batches, gradient checkpointing and every sleep flag; "fast" what this card has room for;
"two_engines" compiles the layers as well, and puts two engines on the card.
Flags after -- go to train_ppo_ray. Writes results.json: seconds and tokens/s of each phase, medians of the steps after
the first.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from openrlhf.tracking.jsonl import read_jsonl

VOCAB = 32_000
# hidden, layers, heads, key heads, intermediate.
SIZES = {"0.4B": (896, 24, 14, 2, 4864), "toy": (128, 2, 2, 1, 256)}
WORDS = (
    "river market winter engine letter garden number window silver planet morning teacher bridge forest music paper "
    "signal harbor copper village summer doctor mirror yellow castle engine ladder ticket pepper cotton island marble"
).split()
PROMPT_WORDS, PROMPTS_A_STEP, SAMPLES = 35, 64, 8
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWARD = '''"""The share of lower-case letters in the response."""


def reward_func(queries, prompts, labels):
    texts = [query[len(prompt):] or " " for query, prompt in zip(queries, prompts)]
    return {"rewards": [sum("a" <= c <= "z" for c in text) / len(text) for text in texts]}
'''
PACKED = (
    *("--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "32768"),
    *("--rollout.max_tokens_per_gpu", "65536"),
)
SETTINGS = {
    "plain": (
        *("--train.micro_batch_size", "8", "--rollout.micro_batch_size", "16", "--ds.attn_implementation", "sdpa"),
        *("--actor.gradient_checkpointing_enable", "--ds.enable_sleep"),
        *("--ds.zero_stage", "2", "--vllm.gpu_memory_utilization", "0.5"),
    ),
    "fast": (*PACKED, "--ds.zero_stage", "2", "--vllm.gpu_memory_utilization", "0.5"),
    "two_engines": (
        *(*PACKED, "--ds.zero_stage", "1", "--ds.torch_compile"),
        *("--vllm.num_engines", "2", "--vllm.gpu_memory_utilization", "0.08"),
    ),
}
PHASES = ("wake", "rollout", "sleep", "logprobs", "advantages", "update", "sync", "step")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte pairs of made-up words, so that sampled ids of the whole vocabulary stand for text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    draw = random.Random(0)
    syllables = [a + b for a in "bcdfghjklmnprstvwz" for b in "aeiou"]
    texts = [" ".join("".join(draw.choices(syllables, k=draw.randint(1, 5))) for _ in range(400)) for _ in range(600)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, " ".join(WORDS)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    return fast


def make_inputs(folder: Path, size: str, steps: int) -> None:
    """Writes model, prompts and reward function."""
    hidden, layers, heads, kv_heads, intermediate = SIZES[size]
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.cpu().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    draw = random.Random(0)
    rows = [
        {"prompt": f"Question {row}: {' '.join(draw.choices(WORDS, k=PROMPT_WORDS))}", "label": str(row)}
        for row in range(PROMPTS_A_STEP * steps)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward_func.py").write_text(REWARD)


def command(folder: Path, args: argparse.Namespace) -> list[str]:
    """Returns: the run's command line."""
    return [
        *(sys.executable, "-m", "openrlhf.cli.train_ppo_ray", "--train.colocate_all", "--vllm.enable_sleep"),
        *("--actor.model_name_or_path", f"{folder}/model", "--reward.remote_url", f"{folder}/reward_func.py"),
        *(
            "--data.prompt_dataset",
            f"{folder}/prompts.jsonl",
            "--data.input_key",
            "prompt",
            "--data.label_key",
            "label",
        ),
        *("--data.apply_chat_template", "--data.max_len", "1024", "--rollout.max_new_tokens", "512"),
        *("--actor.num_gpus_per_node", "1", "--ref.num_gpus_per_node", "1"),
        *("--rollout.batch_size", str(PROMPTS_A_STEP), "--rollout.n_samples_per_prompt", str(SAMPLES)),
        *("--train.batch_size", "128", "--algo.advantage.estimator", "reinforce_baseline", "--algo.kl.use_loss"),
        *("--algo.kl.init_coef", "1e-3", "--algo.kl.estimator", "k2", "--actor.adam.lr", "5e-7"),
        *("--ds.param_dtype", "bf16", *SETTINGS[args.settings]),
        *("--ckpt.output_dir", f"{folder}/out", "--ckpt.path", f"{folder}/states", *args.flags),
    ]


def summary(lines: list[dict[str, float]]) -> dict[str, Any]:
    """Returns: the median of every phase without the first step, in which kernels are made and memory is taken."""
    warm = lines[1:] or lines
    found: dict[str, Any] = {"steps": len(warm)}
    for phase in PHASES:
        seconds = [line[f"time/{phase}"] for line in warm if f"time/{phase}" in line]
        if seconds:
            found[f"{phase}_s"] = round(median(seconds), 3)
    response = [line["rollout/samples"] * line["rollout/response_length"] for line in warm]
    found["response_tokens"] = round(median(response))
    for phase in ("rollout", "step"):
        rates = [tokens / line[f"time/{phase}"] for tokens, line in zip(response, warm, strict=True)]
        found[f"{phase}_tokens_per_s"] = round(median(rates))
    for name in ("throughput/mfu", "memory/actor_gib", "memory/ref_gib", "sync/bytes", "sync/logprob_gap"):
        if name in warm[0]:
            found[name] = median(line[name] for line in warm)
    return found


def run(words: list[str]) -> None:
    """Runs a command to its end, and ends it where this process is told to end. Raises: SystemExit where it fails."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    process = subprocess.Popen(words)
    try:
        code = process.wait()
    finally:
        process.terminate()
        process.wait()
    if code:
        sys.exit(code)


def main() -> None:
    """Makes the inputs, runs, and prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/rl_step"), help="of model, run and results")
    parser.add_argument("--settings", choices=list(SETTINGS), default="fast", help="see above; default fast")
    parser.add_argument("--size", choices=list(SIZES), default="0.4B", help="of the model; default 0.4B")
    parser.add_argument("--steps", type=int, default=4, help="default 4; the first is left out of the medians")
    parser.add_argument("flags", nargs="*", help="further flags of train_ppo_ray, after --")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: give 1 or more")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    make_inputs(args.output_dir, args.size, args.steps)
    run(command(args.output_dir, args))
    found = summary(read_jsonl(args.output_dir / "out" / "metrics.jsonl"))
    found = {"settings": args.settings, "size": args.size, "flags": args.flags, **found}
    (args.output_dir / "results.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
