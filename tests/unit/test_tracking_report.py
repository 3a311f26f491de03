"""The report of a run: right numbers, safe against what a model may write, readable in a real browser."""

import math
import random
import re
import shutil
import subprocess

import pytest

from openrlhf.tracking.jsonl import JSONLFile
from openrlhf.tracking.progress import PHASES
from openrlhf.tracking.report import write_report
from openrlhf.tracking.report_data import (
    Panel,
    Series,
    compact,
    first_and_last_rollouts,
    load_run,
    panels,
    rolling_mean,
    thin,
)
from openrlhf.tracking.report_svg import nice_ticks, tick_labels, value_range
from openrlhf.tracking.rollouts import RolloutRecord, RolloutWriter

INJECTION = "<script>document.title = 'taken over'</script><img src=x onerror=\"document.title='taken over'\">&amp;"


def write_metrics(folder, rows):
    file = JSONLFile(folder / "metrics.jsonl")
    for step, row in enumerate(rows, start=1):
        file.write({"step": step, "time": 1000.0 + 2 * step, **row})
    file.close()


def rl_rows(count):
    rng = random.Random(0)
    rows = []
    for step in range(1, count + 1):
        row = {"reward/mean": step / (step + 20), "reward/std": 0.4, "rollout/response_length": 5 + rng.random()}
        row |= {"kl/reference": 0.01 * rng.random(), "policy/loss": rng.gauss(0, 0.01), "actor/grad_norm": rng.random()}
        row |= {"sync/logprob_gap": 1e-6 * rng.random(), "sync/logprob_gap_max": 1e-5, "actor/lr": 3e-4}
        row |= {f"time/{phase}": 0.2 for phase in PHASES} | {"time/step": 1.5, "throughput/tokens_per_s": 1500.0}
        rows.append(row)
    return rows


def full_rows(count):
    """A run with critic, filter, correction, and an evaluation of two sources every tenth step."""
    rng = random.Random(1)
    rows = rl_rows(count)
    for step, row in enumerate(rows, start=1):
        row |= {"critic/loss": 1 / step, "critic/value_mean": 0.4, "critic/return_mean": 0.5, "critic/grad_norm": 2.0}
        row |= {"critic/explained_variance": 1 - 2 / step, "critic/lr": 9e-6, "critic/clip_fraction": 0.1}
        row |= {"filter/pass_rate": rng.random(), "filter/dropped_groups": 3.0, "policy/entropy": 2.0 - step / count}
        row |= {"correction/touched": 0.01, "correction/weight": 0.99, "correction/ratio_max": 3.0}
        row |= {"policy/ppo_kl": 1e-3, "policy/clip_fraction": 0.02, "rollout/truncated": 0.1}
        if step % 10 == 0:
            for source in ("gsm8k", "math"):
                row |= {f"eval/{source}_pass1": step / 100, f"eval/{source}_pass4": step / 50}
                row |= {f"eval/{source}_reward": 0.5, f"eval/{source}_score": 0.5, f"eval/{source}_length": 200.0}
                row |= {f"eval/{source}_truncated": 0.0, f"eval/{source}_failed": float(source == "math")}
    return rows


FULL_CHARTS = [
    "Reward", "Evaluation", "Evaluation: rewards", "Evaluation: response length", "Evaluation: truncated responses",
    "Evaluation: responses without a reward", "Response length", "KL to the reference", "Policy loss", "Critic loss",
    "Values and returns", "Variance that values explain", "Gradient norm", "Log-prob gap, engine to trainer",
    "Largest ratio, trainer to engine", "Weight of the rollout correction", "Tokens that the correction changes",
    "Policy change in an update", "Clipped tokens", "Entropy", "Truncated responses",
    "Groups that the filter lets pass", "Throughput", "Learning rate", "Time of a step by phase",
]  # fmt: skip


def write_rollouts(folder, steps):
    writer = RolloutWriter(folder)
    for step in steps:
        rows = [
            RolloutRecord(f"{g}+{step}=", INJECTION, label={"x": g}, reward=float(g), group_id=g, sample_id=s, tokens=7)
            for g in range(3)
            for s in range(4)
        ]
        writer.write(step, [*rows, RolloutRecord("p", "r", failure="the reward function timed out", sample_id=0)])
    writer.close()


def html_of(folder, title="a run"):
    page = write_report(folder, title)
    picture = folder / "report.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000
    return page.read_text()


def charts_of(html):
    return re.findall(r"<figcaption><b>([^<]*)</b>", html)


def test_an_rl_run_shows_all_its_panels_the_table_and_rollouts_of_first_and_last_step(tmp_path):
    write_metrics(tmp_path, rl_rows(40))
    write_rollouts(tmp_path, [1, 2, 40])
    (tmp_path / "config.yaml").write_text("actor.adam.lr: 3e-4 # <b>\n")
    html = html_of(tmp_path)
    assert charts_of(html) == [
        "Reward", "Response length", "KL to the reference", "Policy loss", "Gradient norm",
        "Log-prob gap, engine to trainer", "Throughput", "Learning rate", "Time of a step by phase",
    ]  # fmt: skip
    assert '<path class="band c0"' in html and html.count('class="area') == len(PHASES) + 1
    assert "<td>reward/mean</td><td>0.04762</td><td>0.6667</td><td>0.04762</td><td>0.6667</td>" in html
    assert re.findall(r"<h3>(.*?)</h3>", html) == ["Step 1", "Step 40"]
    assert "1m18s from first to last" in html and "40 logged steps" in html
    assert "3e-4 # &lt;b&gt;" in html and "no reward: the reward function timed out" in html


def test_a_run_with_critic_filter_correction_and_evaluation_shows_each_of_them(tmp_path):
    write_metrics(tmp_path, full_rows(40))
    assert charts_of(html_of(tmp_path)) == FULL_CHARTS
    shown = {panel.title: panel for panel in panels(load_run(tmp_path))}
    rates = shown["Evaluation"]
    assert rates.unit == "pass rate"
    assert [series.label for series in rates.series] == ["gsm8k_pass1", "gsm8k_pass4", "math_pass1", "math_pass4"]
    # At the steps of the evaluations, and at those alone.
    assert (rates.series[1].x, rates.series[1].y) == ([10, 20, 30, 40], [0.2, 0.4, 0.6, 0.8])
    failed = shown["Evaluation: responses without a reward"]
    assert ([series.label for series in failed.series], failed.unit) == (["math_failed"], "math_failed, responses")
    assert [series.label for series in shown["Values and returns"].series] == ["value", "return"]
    # Both are smoothed, so that each has a faint line behind it.
    assert len(shown["Gradient norm"].series) == 4


def test_what_a_reward_function_logs_has_a_panel_of_its_own(tmp_path):
    write_metrics(
        tmp_path, [row | {"extra/words": float(n), "extra/none": math.nan} for n, row in enumerate(rl_rows(3))]
    )
    shown = {panel.title: panel for panel in panels(load_run(tmp_path))}
    assert shown["Extra: words"].series[0].y == [0.0, 1.0, 2.0] and "Extra: none" not in shown


def test_what_a_model_wrote_stands_in_the_page_as_text(tmp_path):
    write_metrics(tmp_path, [{"reward/mean": 1.0, "<b>eval": 1.0, 'eval/"><script>': 2.0}])
    write_rollouts(tmp_path, [1])
    html = html_of(tmp_path, "a <title>")
    assert html.count("<script>") == 1 and html.count("<img") == 0 and "<b>eval" not in html
    assert "&lt;script&gt;document.title" in html and "<title>a &lt;title&gt;</title>" in html


def test_the_page_loads_nothing(tmp_path):
    write_metrics(tmp_path, rl_rows(3))
    html = html_of(tmp_path)
    assert set(re.findall(r"https?://[^'\"\s]+", html)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"<link|src=|@import|url\(", html)


def test_an_sft_run_shows_its_loss_curves(tmp_path):
    rows = [{"loss/train": 3 / step, "actor/grad_norm": 1.0, "time/step": 0.4} for step in range(1, 21)]
    rows[9]["loss/eval"] = rows[19]["loss/eval"] = 0.5
    write_metrics(tmp_path, rows)
    html = html_of(tmp_path)
    assert charts_of(html) == ["Loss", "Gradient norm", "Time of a step"]
    loss = panels(load_run(tmp_path))[0]
    assert [(s.label, len(s.x)) for s in loss.series] == [("training", 20), ("evaluation", 2)]
    assert "Rollouts" not in html


@pytest.mark.parametrize("row", [{"reward/mean": 0.5}, {"reward/mean": 0.0, "time/step": 0.0, "sync/logprob_gap": 0.0}])
def test_a_run_of_one_step_has_a_report(tmp_path, row):
    write_metrics(tmp_path, [row])
    assert '<circle class="dot c0"' in html_of(tmp_path)


def test_a_run_without_any_file_has_a_report_that_says_so(tmp_path):
    html = html_of(tmp_path)
    assert "No metrics were logged." in html and "0 logged steps" in html


def test_a_value_that_was_no_number_leaves_a_gap_and_no_nan_in_the_drawing(tmp_path):
    rows = rl_rows(9)
    for name in ("reward/mean", "kl/reference", "sync/logprob_gap", "time/step"):
        rows[4][name] = math.nan
    rows[0]["policy/entropy"] = math.inf
    write_metrics(tmp_path, rows)
    html = html_of(tmp_path)
    assert "Entropy" not in charts_of(html)
    figure = html.split("<b>KL to the reference</b>")[1].split("</figure>")[0]
    assert len(re.findall(r'<path class="line', figure)) == 2
    assert not re.search(r"\b(nan|inf|NaN|Infinity)\b", " ".join(re.findall(r"<svg.*?</svg>", html, re.S)))


def test_a_long_run_is_thinned_and_smoothed(tmp_path):
    write_metrics(tmp_path, rl_rows(3000))
    html = html_of(tmp_path)
    assert len(html) < 1_500_000
    reward = panels(load_run(tmp_path))[0]
    assert [len(s.y) for s in reward.series] == [600, 600] and len(reward.series[0].low) == 600
    assert [s.faint for s in reward.series] == [True, False]


def test_two_lines_of_one_step_are_one_step(tmp_path):
    file = JSONLFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1, "reward/mean": 0.5})
    file.write({"step": 1, "eval/pass1": 0.25})
    file.close()
    run = load_run(tmp_path)
    assert run.steps == [1] and run.rows == [{"reward/mean": 0.5, "eval/pass1": 0.25}]
    assert [p.title for p in panels(run)] == ["Reward", "Evaluation"]


def test_rollouts_of_different_prompts_come_before_a_second_sample_of_one(tmp_path):
    write_rollouts(tmp_path, [3, 5])
    (first, rows), (last, _) = first_and_last_rollouts(load_run(tmp_path), limit=4)
    assert (first, last) == (3, 5)
    assert [row["prompt"] for row in rows] == ["0+3=", "1+3=", "2+3=", "p"]


def test_helpers_of_the_charts_give_what_they_promise():
    assert nice_ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert nice_ticks(1, 120, 7) == [20, 40, 60, 80, 100, 120]
    assert rolling_mean([1, 3, math.nan, 5], 2) == [1, 2, 3, 5]
    assert thin([1, 3, 5, 7], 2) == [2, 6] and math.isnan(thin([math.nan, math.nan], 1)[0])
    assert [compact(v) for v in (0, 0.12345, 1234.5, 1e-7, 12345678, math.nan, None)] == [
        "0", "0.1235", "1,234", "1.00e-07", "1.23e+07", "–", "–",
    ]  # fmt: skip


def test_a_run_of_one_step_says_its_numbers_beside_the_dots_and_every_chart_names_its_axis(tmp_path):
    write_metrics(tmp_path, [{"reward/mean": 0.25, "policy/loss": -0.0125}])
    html = html_of(tmp_path)
    assert re.findall(r'r="3.5"/><text class="tick"[^>]*>([^<]*)<', html) == ["0.25", "-0.0125"]
    assert len(charts_of(html)) == html.count(">step</text>") == 2
    write_metrics(tmp_path, [{"reward/mean": 0.25, "policy/loss": -0.0125}] * 2)
    assert 'r="3.5"/><text' not in html_of(tmp_path)


def test_ticks_of_a_tiny_range_differ_and_noise_of_rounding_is_no_range():
    assert tick_labels([2.3, 2.3000001, 2.3000002]) == ["2.3", "2.3000001", "2.3000002"]
    assert tick_labels([0.0, 1000.0, 2000.0]) == ["0", "1,000", "2,000"]
    low, high = value_range(Panel("", "", [Series("", [1, 2], [0.1, 0.1 + 1e-17])]))
    assert (low, high) == pytest.approx((0.09, 0.11))
    low, high = value_range(Panel("", "", [Series("", [1, 2], [0.1, 0.1 + 1e-16])]))
    assert (low, high) == pytest.approx((0.09, 0.11))
    low, high = value_range(Panel("", "", [Series("", [1, 2], [2.3, 2.3000001])]))
    assert 2.29 < low < high < 2.31
    assert value_range(Panel("", "", [Series("", [1], [0.0])])) == (-1.0, 1.0)


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium; none is on the path")


def chromium(folder, page, *options):
    """Opens a page in a browser of its own, without a network."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += ["--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}", *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, timeout=90, cwd=folder)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@needs_chromium
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_browser_runs_no_script_of_a_rollout_and_shows_numbers_on_hovering(tmp_path):
    write_metrics(tmp_path, rl_rows(40))
    write_rollouts(tmp_path, [1, 40])
    page = write_report(tmp_path, "a run")
    hover = (
        "<script>const s = document.querySelector('svg[data-chart]'), b = s.getBoundingClientRect();"
        "s.dispatchEvent(new MouseEvent('mousemove', {clientX: b.right - 5, clientY: b.top + 40}))</script>"
    )
    copy = tmp_path / "hovered.html"
    copy.write_text(page.read_text().replace("</body>", hover + "</body>"))
    dom = chromium(tmp_path, copy, "--dump-dom")
    assert "<title>a run</title>" in dom and "<img" not in dom
    tip = dom.split('<div id="tip"')[1].split("<script>")[0]
    assert "step 40" in tip and "0.6667" in tip and "mean of 3 steps" in tip


@needs_chromium
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_browser_shows_numbers_on_every_chart_of_a_run_with_all_parts(tmp_path):
    write_metrics(tmp_path, full_rows(40))
    page = write_report(tmp_path, "a run")
    hover = (
        "<script>const seen = []; for (const s of document.querySelectorAll('svg[data-chart]')) {"
        "s.scrollIntoView(); const b = s.getBoundingClientRect();"
        "s.dispatchEvent(new MouseEvent('mousemove', {clientX: b.right - 5, clientY: b.top + 40}));"
        "seen.push(document.getElementById('tip').textContent.includes('step 40'))}"
        "document.title = seen.filter(Boolean).length + ' of ' + seen.length;"
        "document.documentElement.dataset.wide = document.documentElement.scrollWidth - innerWidth</script></body>"
    )
    copy = tmp_path / "hovered.html"
    copy.write_text(page.read_text().replace("</body>", hover))
    dom = chromium(tmp_path, copy, "--window-size=480,1000", "--dump-dom")
    assert f"<title>{len(FULL_CHARTS)} of {len(FULL_CHARTS)}</title>" in dom
    assert int(re.search(r'data-wide="(-?\d+)"', dom)[1]) <= 0


@needs_chromium
@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("width", [1366, 480])
def test_a_browser_draws_the_page_without_a_horizontal_scroll_bar(tmp_path, width):
    from PIL import Image

    write_metrics(tmp_path, rl_rows(40))
    write_rollouts(tmp_path, [1, 40])
    page = write_report(tmp_path, "a run")
    shot = tmp_path / "shot.png"
    chromium(tmp_path, page, f"--window-size={width},1000", f"--screenshot={shot}")
    with Image.open(shot) as image:
        assert image.size == (width, 1000)
        colours = {pixel for _, pixel in image.convert("RGB").getcolors(1 << 24)}
    assert (0x2A, 0x78, 0xD6) in colours and len(colours) > 200
    measured = tmp_path / "measured.html"
    probe = "<script>document.title = document.documentElement.scrollWidth - innerWidth</script></body>"
    measured.write_text(page.read_text().replace("</body>", probe))
    dom = chromium(tmp_path, measured, f"--window-size={width},1000", "--dump-dom")
    assert int(re.search(r"<title>(-?\d+)</title>", dom)[1]) <= 0
