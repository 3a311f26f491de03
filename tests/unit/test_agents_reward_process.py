"""Reward files in their own processes: what they return, how they fail, and that none of them is left running."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openrlhf.agents.reward import PythonRewardSource, RewardFailure, RewardResult
from openrlhf.config.errors import ConfigError
from tests.reward_files import line_of, score_many, score_one, use, write

pytestmark = pytest.mark.slow


def is_running(pid: int) -> bool:
    """Zombies do not count: they wait for a parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_a_function_gets_lists_of_length_one_and_labels_of_any_type_unchanged(tmp_path: Path) -> None:
    code = """
    def reward_func(queries, prompts, labels):
        assert (queries, prompts) == (["question answer"], ["question"])
        assert labels == [{"numbers": [1, 2.5, None], "text": "\\u00fc"}]
        return {"rewards": [2.0], "scores": [0.0], "extra_logs": {"length": 3}}
    """
    outcome = score_one(write(tmp_path, code), {"numbers": [1, 2.5, None], "text": "\u00fc"})
    assert outcome == RewardResult(reward=2.0, score=0.0, extra_logs={"length": 3.0})


def test_a_function_runs_in_the_main_thread_of_another_process_and_imports_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 0.75\n")
    code = """
    import threading
    from beside import VALUE

    def reward_func(queries, prompts, labels):
        in_main_thread = threading.current_thread() is threading.main_thread()
        return {"rewards": VALUE, "extra_logs": {"pid": os.getpid(), "main": in_main_thread}}
    """
    outcome = score_one(write(tmp_path, code))
    assert outcome.reward == 0.75
    assert outcome.extra_logs["main"] == 1.0
    assert outcome.extra_logs["pid"] != os.getpid()


def test_async_calls_run_side_by_side_in_one_process(tmp_path: Path) -> None:
    code = """
    running = most = 0

    async def reward_func(queries, prompts, labels):
        global running, most
        running += 1
        most = max(most, running)
        while most < 8:
            await asyncio.sleep(0.01)
        running -= 1
        return {"rewards": labels, "extra_logs": {"pid": os.getpid()}}
    """
    outcomes = score_many(write(tmp_path, code), list(range(8)))
    assert [outcome.reward for outcome in outcomes] == [float(label) for label in range(8)]
    assert len({outcome.extra_logs["pid"] for outcome in outcomes}) == 1


def test_slow_plain_functions_share_the_work_over_processes_and_quick_ones_need_one(tmp_path: Path) -> None:
    code = """
    def reward_func(queries, prompts, labels):
        time.sleep(labels[0])
        return {"rewards": labels, "extra_logs": {"pid": os.getpid()}}
    """
    path = write(tmp_path, code)
    slow = score_many(path, [0.8, 0.8, 0.8], workers=2)
    assert len({outcome.extra_logs["pid"] for outcome in slow}) == 2
    quick = score_many(path, [0.0] * 40, workers=4)
    assert len({outcome.extra_logs["pid"] for outcome in quick}) == 1


def test_a_batched_function_gets_the_samples_that_come_together(tmp_path: Path) -> None:
    code = """
    def reward_func(queries, prompts, labels):
        assert queries == [f"q{label}" for label in labels]
        return {"rewards": labels, "extra_logs": {"size": len(labels)}}

    reward_func.batched = True
    """
    outcomes = score_many(write(tmp_path, code), list(range(20)))
    assert [outcome.reward for outcome in outcomes] == [float(label) for label in range(20)]
    assert {outcome.extra_logs["size"] for outcome in outcomes} == {20.0}


def test_one_bad_sample_of_a_batch_fails_alone(tmp_path: Path) -> None:
    code = """
    def reward_func(queries, prompts, labels):
        if 3 in labels:
            raise ValueError("three")
        return labels

    reward_func.batched = True
    """
    outcomes = score_many(write(tmp_path, code), list(range(6)), max_retries=1)
    assert [isinstance(outcome, RewardFailure) for outcome in outcomes] == [label == 3 for label in range(6)]


def test_an_exception_is_a_failure_that_names_the_line(tmp_path: Path) -> None:
    code = """
    def check(label):
        return 1 / label

    def reward_func(queries, prompts, labels):
        return [check(labels[0])]
    """
    path = write(tmp_path, code)
    outcome = score_one(path, 0)
    assert isinstance(outcome, RewardFailure)
    assert "ZeroDivisionError: division by zero" in outcome.reason
    assert f"{path}:{line_of(path, '1 / label')} in check: return 1 / label" in outcome.reason
    assert "tries" not in outcome.reason


def test_an_exception_raised_elsewhere_names_the_users_line_too(tmp_path: Path) -> None:
    code = """
    import json

    def reward_func(queries, prompts, labels):
        return json.loads("{")
    """
    path = write(tmp_path, code)
    reason = score_one(path).reason
    assert f"{path}:{line_of(path, 'json.loads')} in reward_func" in reason
    assert "json/decoder.py:" in reason


def test_a_failed_call_is_made_again(tmp_path: Path) -> None:
    code = """
    calls = 0

    def reward_func(queries, prompts, labels):
        global calls
        calls += 1
        if calls < 3:
            raise ConnectionError("the judge is away")
        return [calls]
    """
    path = write(tmp_path, code)
    assert score_one(path, max_retries=2) == RewardResult(reward=3.0, score=3.0)
    failure = score_one(path, max_retries=1)
    assert "the judge is away" in failure.reason
    assert failure.reason.endswith("(in 2 tries)")


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_wrong_number_of_rewards_says_what_was_expected_and_found(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, f"{kind} reward_func(queries, prompts, labels):\n    return [1.0, 2.0]\n")
    assert "expected 1 values, one for each query, found 2" in score_one(path).reason


def test_a_reward_of_nan_is_a_failure(tmp_path: Path) -> None:
    path = write(tmp_path, "def reward_func(queries, prompts, labels):\n    return float('nan')\n")
    assert score_one(path) == RewardFailure("the reward is nan")


def test_sys_exit_in_a_function_is_a_failure_of_its_sample(tmp_path: Path) -> None:
    path = write(tmp_path, "def reward_func(queries, prompts, labels):\n    sys.exit(3)\n")
    assert "SystemExit: 3" in score_one(path).reason


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_that_hangs_is_killed_with_what_it_started_and_others_go_on(tmp_path: Path, kind: str) -> None:
    code = f"""
    {kind} reward_func(queries, prompts, labels):
        if labels[0] == 1:
            child = subprocess.Popen(["sleep", "600"])
            open(r"{tmp_path}/pids", "w").write(f"{{os.getpid()}} {{child.pid}}")
            time.sleep(600)
        return labels
    """
    outcomes = score_many(write(tmp_path, code), [0, 1, 2, 3], timeout=6.0, workers=1)
    assert outcomes[1] == RewardFailure("reward_func took longer than 6 s (--reward.timeout)")
    assert [outcome.reward for outcome in outcomes if isinstance(outcome, RewardResult)] == [0.0, 2.0, 3.0]
    for pid in (tmp_path / "pids").read_text().split():
        assert wait_until(lambda pid=int(pid): not is_running(pid))


def test_an_async_call_that_waits_too_long_ends_alone(tmp_path: Path) -> None:
    code = """
    async def reward_func(queries, prompts, labels):
        await asyncio.sleep(600 if labels[0] == 1 else 0)
        return {"rewards": labels, "extra_logs": {"pid": os.getpid()}}
    """

    async def job(source: PythonRewardSource) -> list[Any]:
        outcomes = [await source.score("q", "p", label) for label in (0, 1, 2)]
        return outcomes

    first, second, third = use(write(tmp_path, code), job, timeout=5.0)
    assert second == RewardFailure("reward_func took longer than 5 s (--reward.timeout)")
    assert first.extra_logs == third.extra_logs, "the process was not restarted"


def test_a_process_killed_from_outside_is_replaced(tmp_path: Path) -> None:
    code = """
    def reward_func(queries, prompts, labels):
        if labels[0] == 1 and not os.path.exists("%s"):
            open("%s", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return labels
    """ % ((tmp_path / "once",) * 2)
    path = write(tmp_path, code)
    assert "was killed by signal 9" in score_one(path, 1).reason
    (tmp_path / "once").unlink()
    assert score_one(path, 1, max_retries=1) == RewardResult(reward=1.0, score=1.0)


def test_a_process_killed_between_calls_is_replaced_without_a_failure(tmp_path: Path) -> None:
    code = """
    def reward_func(queries, prompts, labels):
        return {"rewards": 1.0, "extra_logs": {"pid": os.getpid()}}
    """

    async def job(source: PythonRewardSource) -> list[Any]:
        first = await source.score("q", "p", None)
        os.kill(int(first.extra_logs["pid"]), signal.SIGKILL)
        await asyncio.sleep(0.2)
        return [first, await source.score("q", "p", None)]

    first, second = use(write(tmp_path, code), job)
    assert second.reward == 1.0
    assert first.extra_logs != second.extra_logs


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def rewards(queries, prompts, labels): ...", r"reward.py has no function reward_func\("),
        ("reward_func = 3", r"has no function reward_func\("),
        ("def reward_func(queries): ...", r"cannot be called with \(queries, prompts, labels\)"),
        ("import no_such_package", "cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"),
        ("def reward_func(:", "cannot be imported: SyntaxError"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by signal 9 while importing it"),
        ("sys.exit(1)", "cannot be imported: SystemExit"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        score_one(write(tmp_path, code + "\n"))
    assert "\n" not in str(caught.value)
    assert "--reward.remote_url" in str(caught.value)


def test_a_file_that_is_not_there_or_imports_forever_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.py is not a file"):
        score_one(tmp_path / "nowhere.py")
    with pytest.raises(ConfigError, match="importing it took longer than 1 s"):
        score_one(write(tmp_path, "time.sleep(600)\n"), timeout=1.0)


def test_closing_ends_every_process_and_calls_under_way(tmp_path: Path) -> None:
    code = """
    def reward_func(queries, prompts, labels):
        open(r"%s", "w").write(str(os.getpid()))
        time.sleep(600)
    """ % (tmp_path / "pid")

    async def job(source: PythonRewardSource) -> Any:
        call = asyncio.create_task(source.score("q", "p", None))
        while not (tmp_path / "pid").exists():
            await asyncio.sleep(0.02)
        await source.close()
        return await call

    assert use(write(tmp_path, code), job) == RewardFailure("the reward source was closed")
    pid = int((tmp_path / "pid").read_text())
    assert wait_until(lambda: not is_running(pid))


def test_a_cancelled_call_frees_its_process(tmp_path: Path) -> None:
    code = """
    def reward_func(queries, prompts, labels):
        time.sleep(600 if labels[0] == 1 else 0)
        return labels
    """

    async def job(source: PythonRewardSource) -> Any:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await source.score("q", "p", 1)
        return await source.score("q", "p", 2)

    assert use(write(tmp_path, code), job, workers=1).reward == 2.0


def test_processes_end_with_the_one_that_started_them_even_in_the_middle_of_a_call(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        def reward_func(queries, prompts, labels):
            open(r"%s", "w").write(str(os.getpid()))
            time.sleep(600)
        """
        % (tmp_path / "pid"),
    )
    driver = f"""
import asyncio
from openrlhf.agents.reward import PythonRewardSource

async def main():
    source = PythonRewardSource({str(path)!r})
    await source.start()
    await source.score("q", "p", None)

asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", driver])
    try:
        assert wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
        pid = int((tmp_path / "pid").read_text())
        assert is_running(pid)
    finally:
        process.kill()
        process.wait(timeout=10)
    assert wait_until(lambda: not is_running(pid))


def test_what_a_function_prints_reaches_the_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = """
    def reward_func(queries, prompts, labels):
        print("looking at", queries[0])
        print("oddly", file=sys.stderr)
        return 1.0
    """
    score_one(write(tmp_path, code))
    captured = capfd.readouterr()
    assert "looking at question answer" in captured.out
    assert "oddly" in captured.err
