"""The quickstart: a small model learns to add, by the same two commands that train any other model."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from openrlhf.config.quickstart import PROBLEMS, RL_PROMPTS_PER_STEP, SAVE_EVERY, SFT_BATCH, QuickstartConfig
from openrlhf.tracking.progress import duration
from openrlhf.tracking.report import HTML_FILE
from openrlhf.trainer import quickstart_reward
from openrlhf.trainer.process import prepare_process
from openrlhf.trainer.quickstart_task import (
    LIMIT,
    Problem,
    Splits,
    accuracy,
    make_model,
    make_problems,
    write_problems,
)
from openrlhf.utils.devices import choose_device

RESULT_FILE = "quickstart.json"
# RL has something to reinforce, and something left to learn.
ENOUGH = 0.5
PROBES = 256
UPDATES_PER_STEP = 4
_UNWIND_S = 90.0


class CommandFailed(RuntimeError):
    """A command of the quickstart ended with an error, which it has printed itself."""


class Folders:
    """Where everything lies below the output folder."""

    def __init__(self, output_dir: str) -> None:
        self.root = Path(output_dir).absolute()
        self.data = self.root / "data"
        self.start = self.root / "model"
        self.sft = self.root / "sft"
        self.checkpoints = self.root / "sft_checkpoints"
        self.rl = self.root / "rl"
        self.reward = self.root / "reward_func.py"


def run(config: QuickstartConfig) -> None:
    """Makes data and model, runs SFT and RL, and says how well the model adds before and after.

    Raises:
        CommandFailed: one of the two commands failed.
    """
    prepare_process(choose_device("auto"), bars=False)
    start = time.monotonic()
    at = Folders(config.output_dir)
    at.data.mkdir(parents=True, exist_ok=True)
    splits = make_inputs(config, at)
    right = {"untrained": accuracy(at.start, splits.held_out)}
    _say(
        f"2/3 SFT on {config.sft_rows} worked examples; RL starts from an early checkpoint, to have something to learn"
    )
    _command("train_sft", sft_flags(config, at))
    chosen = choose_start(at.checkpoints, splits.train[:PROBES])
    right["after SFT"] = accuracy(chosen, splits.held_out)
    print(f"taking {chosen.name}, which answers {right['after SFT']:.1%} of the held-out sums right", flush=True)
    _say(f"3/3 RL on {config.rl_prompts} prompts: no worked examples, only a reward for the right answer")
    _command("train_ppo_ray", rl_flags(config, at, chosen))
    right["after RL"] = accuracy(at.rl, splits.held_out)
    (at.root / RESULT_FILE).write_text(json.dumps({"held_out_accuracy": right}, indent=2) + "\n")
    _say(f"done in {duration(time.monotonic() - start)}")
    print(f"held-out accuracy on {len(splits.held_out)} sums that training never saw")
    for name, share in right.items():
        print(f"  {name:<10} {share:6.1%}")
    print(f"report          {at.rl / HTML_FILE}  (SFT: {at.sft / HTML_FILE})")
    print(f"exported model  {at.rl}  (a Hugging Face folder)", flush=True)


def sft_flags(config: QuickstartConfig, at: Folders) -> list[str]:
    """The flags of ``train_sft``."""
    return [
        *("--model.model_name_or_path", str(at.start)),
        *("--data.dataset", str(at.data / "train.jsonl")),
        *("--data.max_samples", str(config.sft_rows)),
        *("--data.input_key", "question"),
        *("--data.output_key", "answer"),
        "--data.apply_chat_template",
        *("--data.max_len", "32"),
        *("--train.batch_size", str(SFT_BATCH)),
        *("--train.micro_batch_size", str(SFT_BATCH)),
        *("--train.max_epochs", str(config.sft_epochs)),
        *("--train.seed", str(config.seed)),
        *("--adam.lr", "2e-3"),
        *("--lr_scheduler", "constant_with_warmup"),
        *("--ds.zero_stage", "0"),
        *("--ds.param_dtype", "fp32"),
        *("--ckpt.output_dir", str(at.sft)),
        *("--ckpt.path", str(at.checkpoints)),
        *("--ckpt.save_steps", str(min(SAVE_EVERY, config.sft_steps))),
        *("--ckpt.max_num", str(config.sft_steps)),
        "--ckpt.save_hf",
        "--ckpt.disable_ds",
        *("--logger.logging_steps", str(min(SAVE_EVERY, config.sft_steps))),
    ]


def rl_flags(config: QuickstartConfig, at: Folders, start: Path) -> list[str]:
    """The flags of ``train_ppo_ray`` from the model ``start``."""
    samples = 8
    return [
        *("--actor.model_name_or_path", str(start)),
        *("--actor.num_gpus_per_node", "1"),
        *("--actor.adam.lr", "3e-4"),
        *("--algo.advantage.estimator", "reinforce_baseline"),
        *("--algo.kl.init_coef", "0"),
        *("--reward.remote_url", str(at.reward)),
        *("--data.prompt_dataset", str(at.data / "train.jsonl")),
        *("--data.max_samples", str(config.rl_prompts)),
        *("--data.input_key", "question"),
        *("--data.label_key", "answer"),
        "--data.apply_chat_template",
        *("--data.max_len", "32"),
        *("--rollout.batch_size", str(RL_PROMPTS_PER_STEP)),
        *("--rollout.n_samples_per_prompt", str(samples)),
        *("--rollout.max_new_tokens", "6"),
        *("--rollout.save_samples", "64"),
        *("--train.batch_size", str(RL_PROMPTS_PER_STEP * samples // UPDATES_PER_STEP)),
        "--train.dynamic_batch_enable",
        *("--train.max_tokens_per_gpu", "8192"),
        *("--train.num_episodes", str(config.rl_episodes)),
        *("--train.seed", str(config.seed)),
        *("--ds.zero_stage", "0"),
        *("--ds.param_dtype", "fp32"),
        *("--vllm.num_engines", "1"),
        *("--ckpt.output_dir", str(at.rl)),
    ]


def choose_start(checkpoints: Path, problems: list[Problem]) -> Path:
    """The earliest checkpoint that answers half of the problems right; the last one where none does.

    When the model takes off differs between machines; where it stands then does not.

    Args:
        checkpoints: folder of ``global_step<N>_hf`` folders.
        problems: to ask, none of them held out.
    """
    folders = sorted(checkpoints.glob("global_step*_hf"), key=lambda folder: int(folder.name[11:-3]))
    return next((folder for folder in folders if accuracy(folder, problems) >= ENOUGH), folders[-1])


def make_inputs(config: QuickstartConfig, at: Folders) -> Splits:
    """Writes data, reward function and start model. Returns: the problems."""
    splits = make_problems(train=PROBLEMS, seed=config.seed)
    write_problems(at.data / "train.jsonl", splits.train)
    write_problems(at.data / "held_out.jsonl", splits.held_out)
    shutil.copyfile(quickstart_reward.__file__, at.reward)
    # Checkpoints of an earlier run would be chosen from as well.
    shutil.rmtree(at.checkpoints, ignore_errors=True)
    parameters = make_model(at.start, seed=config.seed)
    _say(
        f"1/3 sums of two numbers below {LIMIT}, and a model of {parameters / 1e6:.1f} million parameters, in {at.root}"
    )
    return splits


def _command(name: str, flags: list[str]) -> None:
    """Runs a command as a user would, and shows its line.

    Raises: CommandFailed.
    """
    pairs = [shlex.quote(flag) if flag.startswith("--") else f" {shlex.quote(flag)}" for flag in flags]
    lines = "".join(f" \\\n    {part}" if part.startswith("--") else part for part in pairs)
    print(f"$ python -m openrlhf.cli.{name}{lines}", flush=True)
    with subprocess.Popen([sys.executable, "-m", f"openrlhf.cli.{name}", *flags]) as process:
        try:
            status = process.wait()
        except BaseException:
            # The command unwinds by itself when it is told to; killed at once, it would leave its workers behind.
            process.terminate()
            process.wait(_UNWIND_S)
            raise
    if status:
        raise CommandFailed(f"{name} ended with status {status}; what it said last stands above")


def _say(text: str) -> None:
    print(f"\n== {text}", flush=True)
