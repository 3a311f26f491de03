"""The examples' agents and rewards, as files that a run would load."""

from __future__ import annotations

import importlib
import json
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from openrlhf.agents.reward_values import RewardResult
from openrlhf.config.checks import check
from openrlhf.config.parse import parse
from tests.agent_room import REPOSITORY, play_file, say, text_of
from tests.reward_files import score_many
from tests.tiny_models import make_tiny_model

EXAMPLES = REPOSITORY / "examples"
END = "<|im_end|>"
GAME = "examples/multiturn_game/agent.py"
RETRIES = "examples/reasoning_gym_multiturn/agent.py"
PROMPT = "<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\n"
SUM = {
    "question": "Calculate 5 + 9.",
    "answer": "14",
    "metadata": {"source_dataset": "basic_arithmetic", "expression": "5 + 9"},
}


def test_a_game_is_played_to_its_end_and_pays_sensible_guesses() -> None:
    trajectory, engine = play_file(GAME, "16", "8", "20", "12", prompt=PROMPT, templated=True, label=12)
    text, actions = text_of(trajectory)
    assert trajectory.step_rewards == [0.1, 0.1, 0.0, 1.0], "20 is above what was said to be too high"
    assert (trajectory.score, trajectory.reward) == (1.0, pytest.approx(1.2))
    assert trajectory.extra_logs == {"guesses": 4.0, "won": 1.0}
    assert actions == [f"16{END}", f"8{END}", f"20{END}", f"12{END}"]
    turn = f"16{END}\n<|im_start|>user\nMy number is lower than 16.{END}\n<|im_start|>assistant\n8{END}"
    assert text.startswith(PROMPT + turn)
    assert len(engine.requests) == 4


def test_a_game_that_is_not_won_ends_after_its_guesses() -> None:
    trajectory, _ = play_file(GAME, *["hello"] * 6, prompt=PROMPT, templated=True, label=12)
    assert trajectory.step_rewards == [0.0] * 6
    assert (trajectory.score, trajectory.truncated) == (0.0, False)


def test_a_guess_that_ran_out_of_tokens_is_closed_by_the_game() -> None:
    trajectory, _ = play_file(GAME, say("16 or", "length"), "12", prompt=PROMPT, templated=True, label=12)
    text, actions = text_of(trajectory)
    assert actions == ["16 or", f"12{END}"]
    assert f"16 or{END}\n<|im_start|>user" in text


def test_a_later_try_is_worth_less_and_a_right_one_ends_the_sample() -> None:
    pytest.importorskip("reasoning_gym", reason="the example asks for reasoning-gym: see its README")
    first, _ = play_file(RETRIES, "14", prompt=PROMPT, templated=True, label=SUM)
    assert (first.reward, first.score, first.extra_logs) == (1.0, 1.0, {"tries": 1.0, "right_at_once": 1.0})
    second, _ = play_file(RETRIES, "", "14", prompt=PROMPT, templated=True, label=SUM)
    assert second.step_rewards[1] == pytest.approx(0.7 * (1.0 - second.step_rewards[0]))
    assert second.extra_logs == {"tries": 2.0, "right_at_once": 0.0}
    never, _ = play_file(RETRIES, "x", "y", "z", prompt=PROMPT, templated=True, label=SUM)
    assert (never.score, len(never.step_rewards)) == (0.0, 3)


def ask(example: str, samples: list[tuple[str, Any]]) -> list[Any]:
    """Scores (answer, label) pairs by an example's reward file."""
    path = EXAMPLES / example / "reward_func.py"
    return score_many(path, [label for _, label in samples], answers=[answer for answer, _ in samples])


def test_the_custom_reward_counts_words_and_pays_near_ones_in_part() -> None:
    samples = [(f"Rain falls on us.{END}", 4), (f"Rain falls.{END}", 4), ("Rain falls on us", 4), (END, 4)]
    assert ask("custom_reward", samples) == [
        RewardResult(1.0, 1.0, {"words": 4.0}),
        RewardResult(0.5, 0.0, {"words": 2.0}),
        RewardResult(0.0, 0.0, {"words": 4.0}),
        RewardResult(0.0, 0.0, {"words": 0.0}),
    ]


def test_code_is_rewarded_for_the_share_of_its_tests() -> None:
    label = {"tests": ["assert double(2) == 4", "assert double(0) == 0"]}
    right = f"Here:\n```python\ndef double(x):\n    return 2 * x\n```{END}"
    outcomes = ask("code_execution", [(right, label), ("def double(x):\n    return 0", label), ("no code", label)])
    assert [outcome.reward for outcome in outcomes] == [1.0, 0.5, 0.0]
    assert [outcome.score for outcome in outcomes] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/prompts.jsonl")), ids=lambda path: path.parent.name)
def test_every_row_of_an_examples_data_has_prompt_and_label(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) >= 16
    assert all(row["prompt"] and row["label"] for row in rows)


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(EXAMPLES / "code_execution"))
    yield importlib.import_module("sandbox")
    sys.modules.pop("sandbox")


@pytest.mark.parametrize(
    ("solution", "said"),
    [
        ("import sys; sys.exit(0)", ""),
        ("import os; os._exit(0)", ""),
        ("raise KeyError('x')", "KeyError"),
        ("def broken(:", "SyntaxError"),
        ("x = bytearray(2**31)", "MemoryError"),
        ("open('big', 'wb').write(bytes(2**22))", "OSError"),
        ("files = [open('f', 'w') for _ in range(100)]", "Too many open files"),
        ("import socket; socket.create_connection(('127.0.0.1', PORT), 1)", "Error"),
        ("print('x' * 2**22)", "xxx"),
        ("import os; print(sorted(os.environ)); raise SystemExit", "['HOME', 'LC_CTYPE', 'PATH', 'TMPDIR']"),
        ("import os; [os.remove(n) for n in os.listdir('.')]; os.mkdir('d', 0); raise KeyError", "KeyError"),
        ("import os; [os.write(n, b'\\xff') for n in range(3, 40) if n]", ""),
        ("x = '\0\ud800'", ""),
    ],
)
def test_code_beyond_its_limits_passes_nothing(sandbox: ModuleType, solution: str, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        result = sandbox.run_tests(solution.replace("PORT", port), ["pass"], timeout=20.0)
    assert result.passed == 0
    assert not result.timed_out
    assert said in result.output
    assert len(result.output) <= sandbox.OUTPUT_CHARACTERS


@pytest.mark.slow
def test_verdicts_before_a_test_that_hangs_count_and_what_was_started_is_gone(
    sandbox: ModuleType, tmp_path: Path
) -> None:
    beat = tmp_path / "beat"
    code = f"while True: open({str(beat)!r}, 'a').write('x'); __import__('time').sleep(0.05)"
    start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}], start_new_session=True)"
    wait = f"import os, time\nwhile not os.path.exists({str(beat)!r}): time.sleep(0.01)"
    result = sandbox.run_tests(start, [wait, "assert False", "while True: pass"], timeout=8.0)
    assert (result.passed, result.timed_out) == (1, True)
    size = beat.stat().st_size
    time.sleep(0.5)
    assert beat.stat().st_size == size


def test_without_isolation_nothing_is_run(sandbox: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sandbox, "ISOLATE", ["no-such-program"])
    with pytest.raises(sandbox.SandboxUnavailable, match="no program `unshare`"):
        sandbox.require_isolation()
    refusing = tmp_path / "unshare"
    refusing.write_text("#!/bin/sh\necho 'Operation not permitted' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setattr(sandbox, "ISOLATE", [str(refusing)])
    with pytest.raises(sandbox.SandboxUnavailable, match="^Operation not permitted, so code is not run"):
        sandbox.require_isolation()


NEW = ("code_execution", "custom_reward", "multiturn_game", "reasoning_gym_multiturn")


@pytest.mark.parametrize("name", NEW)
def test_the_command_of_an_examples_readme_is_accepted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = (EXAMPLES / name / "README.md").read_text().split("```bash\n")[1].split("```")[0]
    words = shlex.split(block.replace("\\\n", " "))
    assert words[1:3] == ["-m", "openrlhf.cli.train_ppo_ray"]
    # The model and the sums are made by the reader.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    make_tiny_model(tmp_path / "outputs/smollm2")
    (tmp_path / "outputs/sums.jsonl").write_text('{"prompt": "1 + 2 =", "label": 3}\n')
    check(parse("train_ppo_ray", words[3:]))
