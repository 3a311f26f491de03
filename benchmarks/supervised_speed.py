"""Tokens a second of train_sft and train_dpo and of TRL, in turns."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.compare_trl import run_logged, versions
from benchmarks.supervised_cases import Case, Settings, command_here, job_of_trl, make_model, make_rows, write_data
from openrlhf.tracking.jsonl import read_jsonl

HERE = "openrlhf"
# Micro-batches of a step.
MICRO_BATCHES = 2
# Best-fit packing, whose packs stand for micro-batches; ``_runs`` adds how long they are.
PACKED = {"packing": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": MICRO_BATCHES}
AUTOCAST = {"bf16": True}


@dataclass(frozen=True)
class SpeedCase:
    """What is measured.

    Attributes:
        task: "sft" or "dpo".
        dtype: as --ds.param_dtype.
        trl: ways to run TRL by name, fields of its config.
    """

    task: str
    dtype: str
    trl: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


SPEED_CASES = {
    "sft_fp32": SpeedCase("sft", "fp32", {"packing": PACKED, "padded": {}}),
    "sft_bf16": SpeedCase("sft", "bf16", {"packing, bf16 weights": PACKED, "padded, bf16 weights": {}}),
    "dpo_fp32": SpeedCase("dpo", "fp32", {"padded": {}}),
    "dpo_bf16": SpeedCase("dpo", "bf16", {"padded, bf16 weights": {}, "padded, autocast": AUTOCAST}),
}


@dataclass(frozen=True)
class Load:
    """How much is done.

    Attributes:
        rows: of a step; half as many pairs.
        characters: of a row, the fewest and the most, roughly.
        warmup: first steps of a run that are left out.
        rounds: runs of each side.
    """

    steps: int
    rows: int
    characters: tuple[int, int]
    warmup: int
    rounds: int


def compare_speed(
    names: Sequence[str], folder: Path, trl_python: str, load: Load, model: Path | None = None
) -> dict[str, Any]:
    """Runs all sides of each case, one after the other, and that ``load.rounds`` times.

    Args:
        model: a model's folder; None makes a random one.

    Returns: what is written to results.json, ``cases`` for the table.
    """
    model = make_model(folder / "model", "small") if model is None else model.absolute()
    cases = {}
    for name in names:
        runs = _runs(SPEED_CASES[name], load, model, folder / name, trl_python)
        steps: dict[str, list[dict[str, float]]] = {side: [] for side in runs}
        for turn in range(1, load.rounds + 1):
            for side, run in runs.items():
                steps[side] += run(turn)[load.warmup :]
        sides = {side: summary(kept) for side, kept in steps.items()}
        cases[name] = {"sides": sides, "steps": steps}
    return {
        "model": model.name,
        "load": asdict(load),
        "threads": torch.get_num_threads(),
        "versions": versions(trl_python),
        "cases": cases,
    }


def _runs(case: SpeedCase, load: Load, model: Path, folder: Path, trl_python: str) -> dict[str, Any]:
    """Returns: by side, a function that runs it once and gives its steps; ours is the first."""
    items = load.rows if case.task == "sft" else load.rows // 2
    settings = Settings(
        steps=load.steps,
        batch=items,
        micro_batch=items // MICRO_BATCHES,
        dtype=case.dtype,
        lr=1e-5,
        scheduler="constant",
        max_len=2048,
    )
    folder.mkdir(parents=True, exist_ok=True)
    rows = make_rows(case.task, "text", load.steps * items, load.characters)
    ours, theirs = write_data(folder, rows, settings)
    pack = pack_length(rows, model, load.steps * MICRO_BATCHES)

    def here(turn: int) -> list[dict[str, float]]:
        out = folder / f"here_{turn}"
        run_logged(command_here(Case(case.task), settings, model, ours, out), folder / f"here_{turn}.log")
        return steps_here(read_jsonl(out / "metrics.jsonl"))

    def trl(variant: Mapping[str, Any], place: str, turn: int) -> list[dict[str, float]]:
        out = folder / f"{place}_{turn}"
        packed = {"max_length": pack} if variant.get("packing") else {}
        job = job_of_trl(Case(case.task, trl={**variant, **packed}), settings, model, theirs, out)
        jobs = out.with_suffix(".json")
        jobs.write_text(json.dumps([job]))
        script = Path(__file__).with_name("trl_supervised.py")
        run_logged([trl_python, str(script), str(jobs)], out.with_suffix(".log"))
        return read_jsonl(job["metrics"])

    others = {
        f"trl, {label}": lambda turn, variant=variant, place=f"trl{place}": trl(variant, place, turn)
        for place, (label, variant) in enumerate(case.trl.items(), start=1)
    }
    return {HERE: here, **others}


def pack_length(rows: Sequence[Mapping[str, Any]], model: Path, packs: int) -> int:
    """Returns: tokens that a pack has to hold for all rows to fit into ``packs`` of them, with some room."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    lengths = [len(tokenizer("".join(row.values()))["input_ids"]) + 1 for row in rows]
    return max(math.ceil(1.02 * sum(lengths) / packs), max(lengths))


def steps_here(lines: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Returns: seconds and tokens of each step of a run here; seconds from line to line, as TRL's are, and the first
    step's own."""
    ends = [line["time"] for line in lines]
    seconds = [lines[0]["time/step"], *(end - start for start, end in zip(ends, ends[1:], strict=False))]
    return [
        {"seconds": taken, "tokens": line["throughput/tokens_per_s"] * line["time/step"]}
        for taken, line in zip(seconds, lines, strict=True)
    ]


def summary(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns: medians over steps, and the slowest and fastest."""
    speeds = [step["tokens"] / step["seconds"] for step in steps]
    return {
        "steps": len(steps),
        "seconds": median(step["seconds"] for step in steps),
        "tokens_per_s": median(speeds),
        "slowest": min(speeds),
        "fastest": max(speeds),
    }


def speed_table(cases: Mapping[str, Any]) -> str:
    """Returns: the comparison as Markdown; the ratio is ours over the side of the line."""
    lines = [
        "| case | side | tokens/s, median | slowest to fastest step | openrlhf / side |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, case in cases.items():
        ours = case["sides"][HERE]["tokens_per_s"]
        for side, row in case["sides"].items():
            ratio = "" if side == HERE else f"{ours / row['tokens_per_s']:.2f}"
            spread = f"{row['slowest']:.0f} to {row['fastest']:.0f}"
            lines.append(f"| `{name}` | {side} | {row['tokens_per_s']:.0f} | {spread} | {ratio} |")
    return "\n".join(lines)
