"""Step by step: losses, gradient norms, learning rates and the weights that come out, of train_sft and train_dpo and of
TRL."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.compare_trl import run_logged, versions
from benchmarks.supervised_cases import (
    BOUNDED_STEPS,
    CASES,
    Difference,
    Settings,
    command_here,
    job_of_trl,
    make_model,
    make_rows,
    write_data,
)
from openrlhf.tracking.jsonl import read_jsonl

TOLERANCE = 1e-4
SAME_RATE = 1e-9
METRICS_HERE = {"loss": "loss/train", "grad_norm": "actor/grad_norm", "lr": "actor/lr"}


def compare_losses(names: Sequence[str], folder: Path, trl_python: str, *, steps: int) -> dict[str, Any]:
    """Runs the cases on both sides. Returns: what is written to results.json, ``cases`` for the table."""
    settings = Settings(steps=steps, batch=8, micro_batch=2)
    places = {name: prepare(name, settings, folder / name) for name in names}
    jobs = folder / "jobs.json"
    jobs.write_text(json.dumps([place["job"] for place in places.values()]))
    script = Path(__file__).with_name("trl_supervised.py")
    run_logged([trl_python, str(script), str(jobs)], folder / "trl.log")
    cases = {}
    for name, place in places.items():
        run_logged(place["command"], folder / name / "here.log")
        here, there = read_here(folder / name / "here"), read_jsonl(place["job"]["metrics"])
        found = compare(here, there) | {"weights": weights_apart(folder / name / "here", folder / name / "trl")}
        known = CASES[name].differs
        found |= {
            "differs": None if known is None else known.reason,
            "as_known": as_known(here, there, known) and math.isfinite(found["weights"]),
            "openrlhf": here,
            "trl": there,
        }
        cases[name] = found
    return {"settings": asdict(settings), "versions": versions(trl_python), "cases": cases}


def prepare(name: str, settings: Settings, folder: Path) -> dict[str, Any]:
    """Writes model and data of a case. Returns: ``command`` of this side, ``job`` of the other."""
    case = CASES[name]
    model = make_model(folder / "model", "toy", case.template)
    rows = make_rows(case.task, case.form, settings.steps * settings.batch, (20, 120))
    ours, theirs = write_data(folder, rows, settings)
    return {
        "command": command_here(case, settings, model, ours, folder / "here"),
        "job": job_of_trl(case, settings, model, theirs, folder / "trl"),
    }


def read_here(folder: Path) -> list[dict[str, float]]:
    """Returns: steps of a run of this side, under the names of the other."""
    lines = read_jsonl(folder / "metrics.jsonl")
    return [{name: line[metric] for name, metric in METRICS_HERE.items()} for line in lines]


def compare(
    here: Sequence[Mapping[str, float]], there: Sequence[Mapping[str, float]], tolerance: float = TOLERANCE
) -> dict[str, Any]:
    """Compares two runs.

    Returns: ``agree`` (as many steps, and no loss further apart than ``tolerance``), the step of the first that is
        (``first``, from 1; None where they agree), and the largest differences of ``loss``, ``grad_norm`` and ``lr``
        over the steps that both have.
    """
    apart = [
        {name: abs(one[name] - other[name]) for name in METRICS_HERE} for one, other in zip(here, there, strict=False)
    ]
    # Written so that NaN is no agreement.
    far = [step for step, gap in enumerate(apart, start=1) if not gap["loss"] <= tolerance]
    same_length = len(here) == len(there) > 0
    first = far[0] if far else None if same_length else len(apart) + 1
    return {"steps": len(apart), "agree": first is None, "first": first} | {
        name: _largest([gap[name] for gap in apart]) for name in METRICS_HERE
    }


def as_known(
    here: Sequence[Mapping[str, float]],
    there: Sequence[Mapping[str, float]],
    known: Difference | None,
    tolerance: float = TOLERANCE,
) -> bool:
    """Whether two runs agree or differ as they are known to.

    Args: ``known``: None where the losses have to agree.

    Returns: False too where a run lacks a step, a number is not finite or the learning rates are not the same: no other
        loss explains that.
    """
    found = compare(here, there, tolerance)
    if len(here) != len(there) or not all(
        math.isfinite(step[name]) for step in (*here, *there) for name in METRICS_HERE
    ):
        return False
    if found["lr"] > SAME_RATE:
        return False
    if known is None or len(here) < known.first:
        return found["agree"]
    if found["agree"] or found["first"] < known.first:
        return False
    return compare(here[:BOUNDED_STEPS], there[:BOUNDED_STEPS])["loss"] <= known.most


def _largest(values: Sequence[float]) -> float:
    return math.nan if not values or any(math.isnan(value) for value in values) else max(values)


def weights_apart(one: Path, other: Path) -> float:
    """Returns: the largest difference of a weight of two exported models.

    Raises: ValueError where they do not have the same tensors.
    """
    weights, others = (load_file(folder / "model.safetensors") for folder in (one, other))
    if weights.keys() != others.keys():
        raise ValueError(f"only one of {one} and {other} has {sorted(weights.keys() ^ others.keys())}")
    return _largest([float((weights[name].double() - others[name].double()).abs().max()) for name in weights])


def losses_table(cases: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns: the comparison as Markdown."""
    lines = [
        "| case | losses agree to 1e-4 | largest difference: loss | gradient norm | final weights | known difference |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, case in cases.items():
        agree = f"yes, all {case['steps']} steps" if case["agree"] else f"no, from step {case['first']} on"
        figures = " | ".join(f"{case[part]:.1e}" for part in ("loss", "grad_norm", "weights"))
        lines.append(f"| `{name}` | {agree} | {figures} | {case['differs'] or ''} |")
    return "\n".join(lines)
