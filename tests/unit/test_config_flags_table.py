"""Every flag that published commands rely on exists with its type, arity, default and choices."""

from __future__ import annotations

import ast
import csv
from pathlib import Path

import pytest

from openrlhf.config import COMMANDS, parse, resolve
from openrlhf.config.flags import flags_of

ROOT = Path(__file__).parents[2]
ROWS = list(csv.DictReader((ROOT / "tests/data/flags.tsv").open(), delimiter="\t"))

KINDS = {"store_true": bool, "store_false": bool, "int": int, "float": float, "str": str}
NEGATIVE = [row for row in ROWS if row["type_or_action"] == "store_false"]
POSITIVE = [row for row in ROWS if row["type_or_action"] != "store_false"]

# Defaults and choices that differ on purpose; docs/differences.md says why.
OTHER_DEFAULTS = {
    "ds.attn_implementation": "auto",
    "ds.packing_samples": True,
    "vllm.num_engines": 1,
    "host": "127.0.0.1",
}
MORE_CHOICES = {
    "ds.param_dtype": {"fp32"},
    "actor.policy_loss_type": {"cispo", "sapo", "gmpo"},
    "algo.advantage.estimator": {"opo"},
}


def label(row: dict[str, str]) -> str:
    return f"{row['command']}-{row['flag'].lstrip('-')}"


def literal(text: str):
    """Returns: the value of a default as the table spells it."""
    if text in ("float('inf')", "int(100000000.0)"):
        return {"float('inf')": float("inf"), "int(100000000.0)": 100_000_000}[text]
    return ast.literal_eval(text)


def normal(value):
    """Tuples and lists are one thing, and so are one word and a list of it."""
    return list(value) if isinstance(value, list | tuple) else value


def test_the_table_covers_six_commands_and_is_whole():
    assert {row["command"] for row in ROWS} == set(COMMANDS)
    assert len(ROWS) == 421


@pytest.mark.parametrize("row", POSITIVE, ids=label)
def test_flag_has_its_type_arity_default_and_choices(row):
    name = row["flag"].removeprefix("--")
    flag = flags_of(COMMANDS[row["command"]])[name]

    assert flag.kind is KINDS[row["type_or_action"]]
    assert str(flag.nargs or "") == row["nargs"].strip("'")
    wanted = set(ast.literal_eval(row["choices"])) if row["choices"].startswith("['") else set()
    assert set(flag.choices) == wanted | (MORE_CHOICES.get(name, set()))
    if name in OTHER_DEFAULTS:
        assert flag.default == OTHER_DEFAULTS[name]
    elif name == "logger.wandb.run_name" or not row["default"]:
        assert flag.default in (None, False)
    elif flag.nargs == "*":
        assert list(flag.default) == [literal(row["default"])]
    else:
        assert normal(flag.default) == normal(literal(row["default"]))


@pytest.mark.parametrize("row", NEGATIVE, ids=label)
def test_negative_flag_turns_its_switch_off(row):
    name = row["flag"].removeprefix("--")
    positive = flags_of(COMMANDS[row["command"]])[name.replace(".no_", ".")]

    assert positive.negative == name
    assert positive.value(parse(row["command"], [])) is True
    assert positive.value(parse(row["command"], [row["flag"]])) is False


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_can_be_given_its_default_and_changes_nothing(command):
    flags = flags_of(COMMANDS[command])
    words: list[str] = []
    for flag in flags.values():
        if flag.kind is bool:
            words.append(f"--{flag.name if flag.default else flag.negative}")
        elif flag.kind is not dict and flag.name != "config":
            values = flag.default if isinstance(flag.default, tuple) else (flag.default,)
            words += [f"--{flag.name}", *map(str, values)]

    assert parse(command, words) == parse(command, [])


def test_run_name_is_made_of_command_and_time_when_it_is_resolved():
    name = resolve(parse("train_sft", [])).logger.wandb.run_name

    command, _, when = name.rpartition("_")
    assert command == "train_sft"
    assert len(when) == len("0131T23:59") and when[4] == "T" and when[7] == ":"


@pytest.mark.parametrize("name", [*OTHER_DEFAULTS, *MORE_CHOICES, "trust_remote_code", "device", "vllm"])
def test_every_deliberate_difference_is_written_down(name):
    assert name in (ROOT / "docs/differences.md").read_text()
