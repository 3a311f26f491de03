"""Every algorithm on the quickstart's task: held-out accuracy before and after RL, from one start for each seed.

    python benchmarks/learning_curves.py --output_dir outputs/learning_curves --seeds 1 2 3
    python benchmarks/learning_curves.py --algorithms ppo grpo --seeds 1 --steps 64 --device cpu

Writes results.jsonl (one run a line), table.md and curves.png. Runs that are in results.jsonl already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.config.quickstart import PROBLEMS, QuickstartConfig
from openrlhf.tracking.jsonl import read_jsonl
from openrlhf.trainer.process import prepare_process
from openrlhf.trainer.quickstart import PROBES, Folders, choose_start, make_inputs, rl_flags, sft_flags
from openrlhf.trainer.quickstart_task import Problem, accuracy, make_problems
from openrlhf.utils.devices import choose_device

GROUP = ("--algo.kl.init_coef", "0")
ALGORITHMS: dict[str, tuple[str, ...]] = {
    # A learned judge in place of the reward function, a critic that starts from it, and a KL in the reward.
    "ppo": (
        *("--algo.advantage.estimator", "gae", "--algo.advantage.lambd", "0.95", "--algo.kl.init_coef", "0.02"),
        *("--critic.num_gpus_per_node", "1", "--critic.adam.lr", "5e-4", "--ref.num_gpus_per_node", "1"),
        *("--reward.num_gpus_per_node", "1"),
    ),
    "reinforce++": ("--algo.advantage.estimator", "reinforce", *GROUP),
    "reinforce++-baseline": ("--algo.advantage.estimator", "reinforce_baseline", *GROUP),
    "rloo": ("--algo.advantage.estimator", "rloo", *GROUP),
    "grpo": ("--algo.advantage.estimator", "group_norm", *GROUP),
    "dr_grpo": ("--algo.advantage.estimator", "dr_grpo", *GROUP),
    "gspo": ("--algo.advantage.estimator", "group_norm", "--actor.policy_loss_type", "gspo", *GROUP),
}
# One GPU for everything: engines take little, since several runs may share the card.
ON_GPU = (
    *("--train.colocate_all", "--vllm.gpu_memory_utilization", "0.06", "--vllm.enforce_eager"),
    # A cache of a fixed size: the free memory that an engine would measure changes with the other runs.
    *("--vllm.extra", '{"kv_cache_memory_bytes": 1000000000}'),
    *("--ds.param_dtype", "bf16"),
)
ADDER_STEPS, JUDGE_STEPS, JUDGE_BATCH = 600, 4000, 256
ALPHABET = "0123456789+=- a"


def main() -> None:
    """Makes the starts, runs what is missing, and draws."""
    args = _arguments()
    device = choose_device(args.device)
    prepare_process(device, bars=False)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    results = args.output_dir / "results.jsonl"
    done = {(row["algorithm"], row["seed"]) for row in read_jsonl(results)} if results.is_file() else set()
    starts = {
        seed: _start(args.output_dir / f"seed{seed}", seed, args.steps, device, "ppo" in args.algorithms)
        for seed in args.seeds
    }
    waiting = [(name, seed) for seed in args.seeds for name in args.algorithms if (name, seed) not in done]
    with ThreadPoolExecutor(args.parallel) as pool, results.open("a") as file:
        for row in pool.map(lambda run: _run(*run, starts[run[1]], args, device), waiting):
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{row['algorithm']:<22} seed {row['seed']}  {row['before']:.3f} -> {row['after']:.3f}", flush=True)
    rows = read_jsonl(results)
    (args.output_dir / "table.md").write_text(table(rows))
    draw(rows, args.output_dir / "curves.png")
    print(table(rows))


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/learning_curves"))
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=96, help="rollout steps of RL")
    parser.add_argument("--parallel", type=int, default=1, help="runs at one time")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    return parser.parse_args()


def _start(root: Path, seed: int, steps: int, device: str, with_judge: bool) -> dict[str, Any]:
    """The model that every algorithm starts from, and a judge of sums."""
    config = QuickstartConfig(output_dir=str(root), rl_steps=steps, seed=seed)
    at = Folders(config.output_dir)
    at.data.mkdir(parents=True, exist_ok=True)
    if list(at.checkpoints.glob("*_hf")):
        splits = make_problems(train=PROBLEMS, seed=seed)
    else:
        splits = make_inputs(config, at)
        _command(root / "sft.log", "train_sft", sft_flags(config, at))
    chosen = choose_start(at.checkpoints, splits.train[:PROBES])
    judge = root / "judge"
    if with_judge and not (judge / "config.json").is_file():
        right = train_judge(at, chosen, judge, splits.train, splits.held_out, seed, device)
        print(f"seed {seed}: the judge puts {right:.1%} of held-out pairs in order")
    return {"config": config, "at": at, "start": chosen, "judge": judge, "held_out": splits.held_out,
            "before": accuracy(chosen, splits.held_out)}  # fmt: skip


def train_judge(
    at: Folders, start: Path, folder: Path, problems: list[Problem], held_out: list[Problem], seed: int, device: str
) -> float:
    """Trains a reward model that scores right answers near 1 and others near 0.

    It first learns to add, from the last SFT checkpoint on, and then to judge: made-up answers, and samples of the
    policy that it will judge. A judge that cannot add, or knows neat mistakes alone, pays for wrong answers, and PPO
    finds them.

    Returns: the share of held-out pairs (right answer, wrong answer) that it puts in order.
    """
    last = max(at.checkpoints.glob("*_hf"), key=lambda path: int(path.name[11:-3]))
    tokenizer = AutoTokenizer.from_pretrained(last, padding_side="right")
    generator = torch.Generator().manual_seed(seed)
    adder = AutoModelForCausalLM.from_pretrained(last, dtype=torch.float32).to(device)

    def language_loss() -> torch.Tensor:
        picks = torch.randint(len(problems), (JUDGE_BATCH,), generator=generator).tolist()
        batch = tokenizer([_text(tokenizer, problems[i], True, generator) for i in picks], return_tensors="pt").to(
            device
        )
        logits = adder(input_ids=batch.input_ids, use_cache=False).logits[:, -4:-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.input_ids[:, -3:].flatten())

    _descend(adder, language_loss, ADDER_STEPS, 2e-3)
    adder.save_pretrained(folder)
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32).to(device)
    sampled = _samples(start, tokenizer, problems)

    def judge_loss() -> torch.Tensor:
        picks = torch.randint(len(problems), (JUDGE_BATCH,), generator=generator).tolist()
        right = torch.rand(JUDGE_BATCH, generator=generator) < 0.5
        texts = [_text(tokenizer, problems[i], bool(r), generator) for i, r in zip(picks, right, strict=True)]
        own = [sampled[i] for i in torch.randint(len(sampled), (JUDGE_BATCH,), generator=generator).tolist()]
        truth = torch.cat([right.float(), torch.tensor([float(label) for _, label in own])])
        return (_scores(model, tokenizer, texts + [text for text, _ in own]) - truth.to(device)).square().mean()

    _descend(model, judge_loss, JUDGE_STEPS, 1e-3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with torch.no_grad():
        good, bad = (
            _scores(model, tokenizer, [_text(tokenizer, p, r, generator) for p in held_out]) for r in (True, False)
        )
    return float((good > bad).float().mean())


def _descend(model: Any, loss_of: Callable[[], torch.Tensor], steps: int, lr: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        loss_of().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _samples(start: Path, tokenizer: Any, problems: list[Problem]) -> list[tuple[str, bool]]:
    """Whole conversations that the policy of ``start`` samples, four to a problem, and whether each is right."""
    policy = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).eval()
    left = AutoTokenizer.from_pretrained(start, padding_side="left")
    found = []
    for first in range(0, len(problems), 256):
        batch = [problem for problem in problems[first : first + 256] for _ in range(4)]
        chats = [[{"role": "user", "content": problem.question}] for problem in batch]
        texts = left.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        inputs = left(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            output = policy.generate(
                input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, do_sample=True, max_new_tokens=6
            )
        answers = left.batch_decode(output[:, inputs.input_ids.shape[1] :])
        for problem, text, answer in zip(batch, texts, answers, strict=True):
            answer = answer.replace(left.pad_token, "")
            found.append((text + answer, answer == problem.answer + left.eos_token))
    return found


def _scores(model: Any, tokenizer: Any, texts: list[str]) -> torch.Tensor:
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    hidden = model.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    ends = batch.attention_mask.sum(1) - 1
    return model.score(hidden)[torch.arange(len(texts), device=model.device), ends, 0]


def _text(tokenizer: Any, problem: Problem, right: bool, generator: torch.Generator) -> str:
    """A whole conversation; wrong answers are near the right one as often as far from it."""
    answer = problem.answer
    while not right and answer == problem.answer:
        kind = int(torch.randint(4, (1,), generator=generator))
        offset = int(torch.randint(1, 10, (1,), generator=generator))
        # Mistakes of one are the ones that a policy makes.
        offset = 1 if offset > 6 else offset
        offset *= 1 if torch.rand(1, generator=generator) < 0.5 else -1
        number = int(problem.answer)
        if kind < 2:
            answer = f"{(number + (offset if kind else 10 * offset)) % 100:02d}"
        elif kind == 2:
            answer = str(int(torch.randint(1000, (1,), generator=generator)))
        else:
            places = torch.randint(len(ALPHABET), (1 + abs(offset) % 5,), generator=generator).tolist()
            answer = "".join(ALPHABET[place] for place in places)
    chat = [{"role": "user", "content": problem.question}, {"role": "assistant", "content": answer}]
    return tokenizer.apply_chat_template(chat, tokenize=False)


def _run(name: str, seed: int, start: dict[str, Any], args: Any, device: str) -> dict[str, Any]:
    """One run of RL. Returns: its line of results.jsonl."""
    began = time.monotonic()
    at = Folders(str(args.output_dir / f"seed{seed}"))
    at.rl = at.root / name
    flags = rl_flags(start["config"], at, start["start"])
    if name == "ppo":
        place = flags.index("--reward.remote_url")
        flags[place : place + 2] = ["--reward.model_name_or_path", str(start["judge"])]
    more = [*ALGORITHMS[name], *(ON_GPU if device == "cuda" else ()), "--device", device]
    _command(at.root / f"{name}.log", "train_ppo_ray", flags + more)
    curve = [row["reward/mean"] for row in read_jsonl(at.rl / "metrics.jsonl")]
    return {
        "algorithm": name,
        "seed": seed,
        "before": start["before"],
        "after": accuracy(at.rl, start["held_out"]),
        "reward": curve,
        "seconds": round(time.monotonic() - began, 1),
        "device": device,
    }


def _command(log: Path, name: str, flags: list[str]) -> None:
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, "-m", f"openrlhf.cli.{name}", *flags], stdout=file, stderr=subprocess.STDOUT
        )
    if done.returncode:
        raise SystemExit(f"{name} ended with status {done.returncode}: see {log}\n{log.read_text()[-2000:]}")


def table(rows: list[dict[str, Any]]) -> str:
    """Returns: a Markdown table, one line an algorithm."""
    seeds = sorted({row["seed"] for row in rows})
    lines = ["| algorithm | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean after RL |"]
    lines.append("| --- " * (len(seeds) + 2) + "|")
    for name in ALGORITHMS:
        found = {row["seed"]: row for row in rows if row["algorithm"] == name}
        if found:
            cells = [f"{found[s]['before']:.1%} → {found[s]['after']:.1%}" if s in found else "" for s in seeds]
            after = mean(row["after"] for row in found.values())
            lines.append(f"| {name} | " + " | ".join(cells) + f" | {after:.1%} |")
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes a picture: the mean reward of each step, mean over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name in ALGORITHMS:
        curves = [row["reward"] for row in rows if row["algorithm"] == name]
        if curves:
            length = min(map(len, curves))
            axes.plot(range(1, length + 1), [mean(curve[i] for curve in curves) for i in range(length)], label=name)
    axes.set(xlabel="rollout step", ylabel="reward of the samples (ppo: the judge's score)", ylim=(0, 1.05))
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
