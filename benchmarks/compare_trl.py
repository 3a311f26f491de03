"""A whole GRPO step on a CPU, here and in TRL: same model, prompts, sampling, batch, micro-batch and loss.

    python -m venv trl_venv && trl_venv/bin/pip install torch trl datasets
    python benchmarks/compare_trl.py --trl_python trl_venv/bin/python --model outputs/smollm2
    python benchmarks/compare_trl.py --trl_python trl_venv/bin/python --cases toy --steps 4

One after the other, so nothing else should run on the machine. Writes results.json and prints medians without the first
steps, in which both sides warm up. TRL generates in its one process with transformers; here vLLM generates in another.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from openrlhf.tracking.jsonl import read_jsonl
from openrlhf.trainer.quickstart_task import make_tokenizer

REWARD = '''"""The share of lower-case letters in the response."""


def reward_func(queries, prompts, labels):
    texts = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    return {"rewards": [sum(c.islower() for c in text) / max(1, len(text)) for text in texts]}
'''
SUBJECTS = ("rivers", "bread", "the moon", "sailing", "trees", "music", "winter", "bridges")


@dataclass(frozen=True)
class Case:
    """What both sides do.

    Attributes:
        model: folder.
        data: JSON lines with a conversation ``prompt`` and an empty ``label``.
        prompts, samples: prompts of a step, and samples of each.
        new_tokens: at most, of a response.
        micro_batch: samples of one forward and backward; one optimizer step takes all samples.
        dtype: of the weights in forward and backward.
        times: file of TRL's step times.
    """

    model: str
    data: str
    prompts: int
    samples: int
    new_tokens: int
    micro_batch: int
    dtype: str
    lr: float
    steps: int
    output_dir: str
    times: str


def main() -> None:
    """Runs both sides and prints the comparison."""
    args = _arguments()
    for name in args.cases:
        print(f"\n{name}\n\n{table(compare(name, args))}", flush=True)


def compare(name: str, args: Any) -> dict[str, dict[str, float]]:
    """Runs one case on both sides. Returns: what ``table`` shows."""
    folder = (args.output_dir / name).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    toy = name == "toy"
    model = make_toy(folder / "model") if toy else args.model
    case = Case(
        model=str(Path(model).absolute()),
        data=str(write_prompts(folder / "prompts.jsonl", 8 * args.steps)),
        prompts=8,
        samples=8,
        new_tokens=64 if toy else 48,
        micro_batch=args.micro_batch,
        dtype="float32" if toy else "bfloat16",
        lr=1e-6,
        steps=args.steps,
        output_dir=str(folder / "trl"),
        times=str(folder / "trl_times.jsonl"),
    )
    sides = {"openrlhf": run_here(case, folder, args.flags), "trl": run_trl(case, folder, args.trl_python)}
    rows = {name: summary(steps, args.warmup) for name, steps in sides.items()}
    rows["ratio"] = {name: rows["trl"][name] / rows["openrlhf"][name] for name in ("seconds", "tokens", "tokens_per_s")}
    result = {"case": asdict(case), "flags": args.flags, "versions": versions(args.trl_python), **rows, "steps": sides}
    (folder / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    return rows


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=["toy", "smollm"], default=["toy", "smollm"])
    parser.add_argument("--trl_python", required=True, help="the Python that has trl")
    parser.add_argument("--model", default="outputs/smollm2", help="folder of SmolLM2-135M-Instruct, for smollm")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/compare_trl"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2, help="first steps that are left out")
    parser.add_argument("--micro_batch", type=int, default=8)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of train_ppo_ray; last")
    args = parser.parse_args()
    if not 0 <= args.warmup < args.steps:
        parser.error(
            f"--warmup {args.warmup} leaves nothing of --steps {args.steps}: take a smaller one, or more steps"
        )
    if "smollm" in args.cases and not (Path(args.model) / "config.json").is_file():
        parser.error(f"--model {args.model} is no model folder: examples/reasoning_gym/make_model.py makes one")
    if 64 % args.micro_batch:
        parser.error(f"--micro_batch {args.micro_batch} does not divide the 64 samples of a step, as TRL needs")
    return args


def make_toy(folder: Path) -> Path:
    """Writes a random model of two layers. Returns: ``folder``."""
    tokenizer = make_tokenizer()
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_prompts(path: Path, count: int) -> Path:
    """Writes conversations that ask for long answers. Returns: ``path``."""
    texts = [f"Tell a long story about {SUBJECTS[n % len(SUBJECTS)]}, number {n}." for n in range(count)]
    rows = [{"prompt": [{"role": "user", "content": text}], "label": ""} for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_here(case: Case, folder: Path, flags: list[str]) -> list[dict[str, float]]:
    """Runs train_ppo_ray. Returns: seconds and tokens of the responses of each step."""
    run_logged([*command_here(case, folder), *flags], folder / "here.log")
    lines = read_jsonl(folder / "here" / "metrics.jsonl")
    samples = case.prompts * case.samples
    return [{"seconds": line["time/step"], "tokens": line["rollout/response_length"] * samples} for line in lines]


def command_here(case: Case, folder: Path) -> list[str]:
    """Returns: the command of train_ppo_ray."""
    reward, samples = folder / "reward.py", case.prompts * case.samples
    reward.write_text(REWARD)
    return [
        *(sys.executable, "-m", "openrlhf.cli.train_ppo_ray", "--device", "cpu"),
        *("--actor.model_name_or_path", case.model, "--actor.num_gpus_per_node", "1", "--actor.adam.lr", str(case.lr)),
        *("--actor.lr_scheduler", "constant", "--algo.advantage.estimator", "group_norm", "--algo.kl.init_coef", "0"),
        *("--algo.loss_aggregation", "seq_mean", "--reward.remote_url", str(reward), "--reward.workers", "1"),
        *("--data.prompt_dataset", case.data, "--data.input_key", "prompt", "--data.label_key", "label"),
        *("--data.apply_chat_template", "--data.max_len", "192", "--rollout.max_new_tokens", str(case.new_tokens)),
        *("--rollout.batch_size", str(case.prompts), "--rollout.n_samples_per_prompt", str(case.samples)),
        *("--rollout.micro_batch_size", str(case.micro_batch), "--train.micro_batch_size", str(case.micro_batch)),
        *("--train.batch_size", str(samples), "--ds.param_dtype", {"float32": "fp32", "bfloat16": "bf16"}[case.dtype]),
        *("--ds.zero_stage", "0", "--ckpt.output_dir", str(folder / "here"), "--ckpt.path", str(folder / "states")),
    ]


def run_trl(case: Case, folder: Path, python: str) -> list[dict[str, float]]:
    """Runs trl_steps.py. Returns: as ``run_here``."""
    settings = folder / "case.json"
    settings.write_text(json.dumps(asdict(case)))
    run_logged([python, str(Path(__file__).with_name("trl_steps.py")), str(settings)], folder / "trl.log")
    return read_jsonl(Path(case.times))


def run_logged(command: list[str], log: Path) -> None:
    """Runs a command with its output in ``log``.

    Raises: SystemExit with the end of the log where it fails.
    """
    print(f"running {log.stem}, which writes {log}", flush=True)
    with log.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).returncode
    if code:
        raise SystemExit(f"{log.stem} ended with {code}; the end of {log}:\n{log.read_text()[-2000:]}")


def versions(trl_python: str) -> dict[str, str]:
    """Returns: the packages of both sides that matter."""
    code = "from importlib.metadata import version as v; print(*[f'{p} {v(p)}' for p in %r], sep=', ')"
    sides = {
        "openrlhf": (sys.executable, ("torch", "transformers", "deepspeed", "ray")),
        "trl": (trl_python, ("torch", "transformers", "trl")),
    }
    return {
        name: subprocess.run([python, "-c", code % (packages,)], capture_output=True, text=True).stdout.strip()
        for name, (python, packages) in sides.items()
    }


def summary(steps: list[dict[str, float]], warmup: int) -> dict[str, float]:
    """Returns: medians over the steps after the first ``warmup``."""
    kept = steps[warmup:]
    return {
        "seconds": median(step["seconds"] for step in kept),
        "tokens": median(step["tokens"] for step in kept),
        "tokens_per_s": median(step["tokens"] / step["seconds"] for step in kept),
    }


def table(rows: dict[str, dict[str, float]]) -> str:
    """Returns: the comparison as Markdown."""
    lines = ["| | seconds a step | response tokens a step | response tokens/s |", "| --- | --- | --- | --- |"]
    for name, row in rows.items():
        label = "trl / openrlhf" if name == "ratio" else name
        lines.append(f"| {label} | {row['seconds']:.2f} | {row['tokens']:.2f} | {row['tokens_per_s']:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
