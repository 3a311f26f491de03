"""What a run says: readable on a terminal, sane in a log file."""

import fcntl
import io
import math
import os
import pty
import struct
import termios

import pytest

from openrlhf.tracking.progress import COLUMNS, PHASES, Console, duration, summary_line

RL_STEP = {
    "reward/mean": 0.532,
    "reward/std": 0.41,
    "rollout/response_length": 6.2,
    "kl/reference": 1.2e-3,
    "policy/loss": -0.0132,
    "actor/grad_norm": 0.52,
    "actor/lr": 1e-6,
    "sync/logprob_gap": 3.1e-6,
    "throughput/tokens_per_s": 1523.0,
    "time/step": 1.4,
    **{f"time/{phase}": 0.3 for phase in PHASES},
}


def test_the_line_of_a_step_has_what_one_watches():
    line = summary_line(3, 120, RL_STEP, 200)
    for part in (
        "3/120",
        "0.532±0.410",
        "6.2",
        "1.2e-03",
        "-1.3e-02",
        "5.2e-01",
        "3.1e-06",
        "1523",
        "1.4s",
        "roll 0.3",
        "3m20s left",
    ):
        assert part in line
    assert len(line) < 180


def test_lines_of_different_values_are_aligned():
    other = {**RL_STEP, "reward/mean": -0.1, "reward/std": 0.0, "rollout/response_length": 1024.5, "policy/loss": 3e-7}
    other |= {"kl/reference": math.nan, "actor/grad_norm": 12.0, "throughput/tokens_per_s": 34567.0}
    lines = [summary_line(3, 120, RL_STEP), summary_line(113, 120, other)]
    for label in [column.label for column in COLUMNS if column.metric in RL_STEP and column.metric != "actor/lr"]:
        assert len({line.index(label) for line in lines}) == 1


def test_a_gpu_adds_its_utilisation_in_percent_and_the_actors_memory_in_gib():
    on_gpu = {**RL_STEP, "throughput/mfu": 0.4123, "memory/actor_gib": 61.23, "memory/ref_gib": 9.0}
    line = summary_line(3, 120, on_gpu, 200)
    assert "tok/s   1523  mfu 41%  mem  61GiB    1.4s" in line and " 9GiB" not in line and len(line) <= 200
    supervised = {"loss/train": 1.23, "throughput/tokens_per_s": 98765.4, "throughput/mfu": 0.051}
    line = summary_line(7, 200, {**supervised, "memory/peak_gib": 128.04, "time/step": 0.4}, math.nan)
    assert line == "step   7/200  loss  1.2300  tok/s  98765  mfu  5%  mem 128GiB    0.4s"
    assert not {"mfu", "mem"} & set(summary_line(3, 120, RL_STEP).split())


def test_absent_metrics_are_left_out_and_lost_rewards_are_said():
    assert summary_line(1, 1, {}) == "step 1/1"
    assert "no reward: 3" in summary_line(1, 2, {"reward/failed": 3.0})
    line = summary_line(7, 200, {"loss/train": 1.23, "actor/lr": 2e-3, "time/step": 0.4}, math.nan)
    assert line == "step   7/200  loss  1.2300  lr 2.0e-03    0.4s"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (185, "3m05s"), (7620, "2h07m")])
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text


def test_a_log_gets_one_line_a_step_and_no_bar(monkeypatch):
    stream = io.StringIO()
    console = Console(2, stream)
    with console.phase("rollout", 100) as bar:
        for _ in range(100):
            bar.update()
    console.step(1, RL_STEP)
    console.step(2, RL_STEP)
    assert len(stream.getvalue().splitlines()) == 2 and "\r" not in stream.getvalue()
    assert "left" in stream.getvalue().splitlines()[0] and "left" not in stream.getvalue().splitlines()[1]


def test_a_long_phase_says_in_a_log_that_it_lives(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("openrlhf.tracking.progress.time.monotonic", lambda: clock[0])
    stream = io.StringIO()
    with Console(1, stream).phase("rollout", 4) as bar:
        for _ in range(4):
            clock[0] += 20
            bar.update()
    assert stream.getvalue().splitlines() == [
        "rollout: 2 of 4 samples after 40s",
        "rollout: 4 of 4 samples after 1m20s",
    ]


def test_on_a_terminal_a_bar_shows_and_goes_away_and_the_summary_stays():
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    with os.fdopen(follower, "w") as stream:
        console = Console(1, stream)
        assert console.live
        with console.phase("rollout", 3) as bar:
            bar.update(3)
        console.step(1, RL_STEP)
        console.warn("careful")
        shown = ""
        while "careful" not in shown:
            shown += os.read(leader, 65536).decode()
    os.close(leader)
    assert "rollout" in shown and "0.532±0.410" in shown and "warning: careful" in shown
    assert "rollout" not in shown.split("\r")[-1]


def test_after_the_second_step_of_a_start_the_time_of_the_others_is_guessed_once(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    stream = io.StringIO()
    console = Console(8, stream)
    clock[0] = 500.0
    # A resumed run, whose start took its time, and whose first step does.
    console.begin(3)
    for step, seconds in ((4, 300), (5, 20), (6, 20)):
        clock[0] += seconds
        console.estimate(step)
    assert stream.getvalue() == "if they go as the second, 3 more steps take about 1m00s\n"
    console.begin(5)
    console.estimate(6)
    console.estimate(7)
    console.begin(6)
    console.estimate(7)
    console.estimate(8)
    assert stream.getvalue().splitlines()[1:] == ["if they go as the second, one more step takes about 0s"]


def test_the_time_that_is_left_does_not_count_the_first_step_again(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    stream = io.StringIO()
    console = Console(10, stream)
    console.begin(0)
    for step, seconds in ((1, 90), (2, 10), (3, 20)):
        clock[0] += seconds
        console.step(step, RL_STEP)
    assert [line.split("  ")[-1] for line in stream.getvalue().splitlines()] == [
        "13m30s left",
        "1m20s left",
        "1m45s left",
    ]


def test_an_error_inside_a_phase_passes_and_takes_the_bar_away():
    with pytest.raises(RuntimeError, match="boom"), Console(1, io.StringIO()).phase("update", 1):
        raise RuntimeError("boom")
