"""Traces of chosen steps: which steps, what files, and what is said where they cannot be written."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from openrlhf.config import ConfigError, LoggerConfig, parse
from openrlhf.config.checks_training import check_training
from openrlhf.tracking.progress import Console
from openrlhf.trainer.instruments import StepTracer, TraceSettings
from openrlhf.trainer.profiling import StepTrace, trace_name
from tests.unit.config_args import RL, SFT, built


@pytest.mark.parametrize(("text", "steps"), [(None, None), ("4", (4, 4)), ("3:5", (3, 5)), ("7:7", (7, 7))])
def test_one_step_or_a_first_and_a_last_one_are_traced(text: str | None, steps: tuple[int, int] | None) -> None:
    assert LoggerConfig(profile_steps=text).profiled == steps


@pytest.mark.parametrize("text", ["0", "5:3", "0:2", "3-5", "3:", ":5", "3:5:7", "-1", "all", "", "1.5", "٣"])
@pytest.mark.parametrize(("command", "base"), [("train_sft", SFT), ("train_ppo_ray", RL)], ids=["sft", "rl"])
def test_steps_that_cannot_be_read_are_refused_in_one_sentence(command: str, base: dict[str, str], text: str) -> None:
    config = built(command, base, f"--logger.profile_steps={text}")
    with pytest.raises(ConfigError, match="--logger.profile_steps takes a step, such as 4, or .*; found ") as refusal:
        check_training(config)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize("written", ["3:5", "'3:5'"])
def test_a_range_in_a_yaml_file_is_not_read_as_hours_and_minutes(tmp_path: Path, written: str) -> None:
    (tmp_path / "run.yaml").write_text(f"logger:\n  profile_steps: {written}\n  logging_steps: 2\n")
    config = parse("train_sft", ["--config", str(tmp_path / "run.yaml")])
    assert config.logger.profiled == (3, 5) and config.logger.logging_steps == 2


def test_a_trace_opens_in_a_browser_and_has_a_table_of_operators_beside_it(tmp_path: Path) -> None:
    trace = StepTrace()
    torch.ones(64, 64) @ torch.ones(64, 64)
    assert trace.finish(tmp_path / "profile", trace_name("actor", 1, (3, 5))) is None
    events = json.loads(gzip.decompress((tmp_path / "profile" / "actor_rank1_steps3-5.json.gz").read_bytes()))
    assert any(event.get("name") == "aten::mm" for event in events["traceEvents"])
    table = (tmp_path / "profile" / "actor_rank1_steps3-5.txt").read_text()
    assert "aten::mm" in table and "Self CPU" in table


def test_a_trace_that_cannot_be_written_is_a_sentence_and_no_end_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file")
    problem = StepTrace().finish(tmp_path / "profile", "actor")
    assert problem is not None and "profile/actor.json.gz could not be written" in problem


class RecordingGroup:
    """Ranks that write down what they are asked for."""

    def __init__(self, role: str, problem: str | None = None) -> None:
        self.role = role
        self.calls: list[Any] = []
        self.problem = problem

    def call(self, method: str, *args: Any, timeout: float) -> list[str | None]:
        self.calls.append((method, *args))
        return [self.problem if method == "finish_trace" else None] * 2


def traced(steps: tuple[int, int], first: int, last: int, problem: str | None = None) -> tuple[RecordingGroup, str]:
    """A run over the steps ``first`` to ``last``. Returns: its ranks, and what was said."""
    said, group = io.StringIO(), RecordingGroup("actor", problem)
    tracer = StepTracer(TraceSettings(steps, Path("out/profile")), 1.0, Console(9, said))
    groups: Any = [group]
    for step in range(first, last + 1):
        tracer.begin(step, groups)
        tracer.end(step)
    tracer.close(last)
    return group, said.getvalue()


@pytest.mark.parametrize(
    ("first", "last", "written"),
    [(1, 9, (3, 5)), (1, 4, (3, 4)), (4, 9, (4, 5))],
    ids=["whole", "data end in the middle", "resumed in the middle"],
)
def test_traces_are_written_once_with_the_steps_that_they_really_hold(
    first: int, last: int, written: tuple[int, int]
) -> None:
    group, said = traced((3, 5), first, last)
    assert group.calls == [("start_trace",), ("finish_trace", "out/profile", "actor", written)]
    assert said.count("\n") == 1 and f"steps {written[0]} to {written[1]} were traced: out/profile has" in said


def test_a_run_that_ends_before_the_first_step_to_trace_says_so() -> None:
    group, said = traced((30, 40), 1, 9)
    assert group.calls == [] and said.count("\n") == 1
    assert "--logger.profile_steps 30:40 traced nothing: the run ended after step 9" in said


def test_a_run_that_goes_on_after_the_traced_steps_is_silent() -> None:
    group, said = traced((3, 5), 6, 9)
    assert group.calls == [] and said == ""


def test_what_a_rank_could_not_write_is_a_warning() -> None:
    _, said = traced((3, 5), 1, 9, problem="the trace x could not be written: no space")
    assert said.count("warning: the trace x could not be written: no space") == 2 and "were traced" not in said
