"""The quickstart in small: the real commands, end to end, as a newcomer starts them."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from transformers import AutoModelForCausalLM

from openrlhf.tracking.jsonl import read_jsonl
from openrlhf.trainer.quickstart_task import Problem, accuracy


def run_quickstart(folder, *flags, timeout=540):
    """Runs the command in a session of its own, so that a time-out leaves nothing of it behind."""
    command = [sys.executable, "-m", "openrlhf.cli.quickstart", "--output_dir", str(folder), *flags]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"the quickstart did not end within {timeout} s:\n{output}")
    return process.returncode, output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_quickstart_in_small_leaves_data_models_metrics_reports_and_says_where(tmp_path):
    code, output = run_quickstart(tmp_path, "--sft_steps", "4", "--rl_steps", "2")
    assert code == 0, output
    result = json.loads((tmp_path / "quickstart.json").read_text())["held_out_accuracy"]
    assert list(result) == ["untrained", "after SFT", "after RL"]
    for name, share in result.items():
        assert 0 <= share <= 1 and f"{name:<10} {share:6.1%}" in output
    assert str(tmp_path / "rl" / "report.html") in output and "$ python -m openrlhf.cli.train_ppo_ray" in output

    assert f"taking global_step4_hf, which answers {result['after SFT']:.1%}" in output
    assert len(read_jsonl(tmp_path / "data" / "train.jsonl")) == 2048
    assert [row["step"] for row in read_jsonl(tmp_path / "rl" / "metrics.jsonl")] == [1, 2]
    assert {row["step"] for row in read_jsonl(tmp_path / "rl" / "rollouts.jsonl")} == {1, 2}
    for stage in ("sft", "rl"):
        assert (tmp_path / stage / "report.html").stat().st_size > 10_000
        assert (tmp_path / stage / "report.png").read_bytes().startswith(b"\x89PNG")
    folders = (tmp_path / "sft_checkpoints" / "global_step4_hf", tmp_path / "rl")
    before, after = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders)
    # Without one right answer every advantage is zero, and so is the gradient.
    rewarded = any(row["reward/std"] > 0 for row in read_jsonl(tmp_path / "rl" / "metrics.jsonl"))
    assert any(not before[name].equal(after[name]) for name in before) == rewarded
    held_out = [Problem(row["question"], row["answer"]) for row in read_jsonl(tmp_path / "data" / "held_out.jsonl")]
    assert accuracy(tmp_path / "rl", held_out) == result["after RL"]


@pytest.mark.timeout(120)
def test_a_command_that_fails_ends_the_quickstart_with_its_name(tmp_path):
    (tmp_path / "sft").write_text("a file where the folder of the model should be")
    code, output = run_quickstart(tmp_path, "--sft_steps", "4", "--rl_steps", "1", timeout=100)
    assert code == 1 and "openrlhf quickstart: train_sft ended with status" in output
    assert "train_ppo_ray" not in output


@pytest.mark.timeout(240)
def test_a_quickstart_that_is_told_to_end_takes_its_command_along(tmp_path):
    log = tmp_path / "log.txt"
    command = [sys.executable, "-m", "openrlhf.cli.quickstart", "--output_dir", str(tmp_path / "out")]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + 180
        while "step  10/" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        assert process.wait(60) == 143 and family
        assert psutil.wait_procs(family, timeout=30)[1] == []
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
