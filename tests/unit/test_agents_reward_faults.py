"""Reward functions that raise what would end a process, and the one of the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reward_files import score_many, write


@pytest.mark.parametrize("prefix", ["", "async "])
@pytest.mark.parametrize(
    "error", ["SystemExit(3)", "KeyboardInterrupt()", "asyncio.CancelledError()", "GeneratorExit()"]
)
def test_errors_that_would_end_a_process_fail_their_sample_at_once_and_others_go_on(
    tmp_path: Path, prefix: str, error: str
) -> None:
    code = f"""
    {prefix}def reward_func(queries, prompts, labels):
        if labels[0] == "bad":
            raise {error}
        return os.getpid()
    """
    path = write(tmp_path, code)
    outcomes = score_many(path, ["good", "bad", "good"], timeout=120.0, workers=1)
    assert f"reward_func raised {error.split('.')[-1].split('(')[0]}" in outcomes[1].reason
    assert outcomes[0].reward == outcomes[2].reward, "the process serves on"


def test_the_reward_file_of_the_documentation_runs_as_printed() -> None:
    path = Path(__file__).parents[1] / "data" / "spec_reward_func.py"
    outcomes = score_many(path, list(range(3)))
    assert all(outcome.reward in (0.0, 1.0) for outcome in outcomes)
    assert all(outcome.score == outcome.reward for outcome in outcomes)
    assert all(outcome.extra_logs == {"custom_metric": outcome.reward} for outcome in outcomes)
