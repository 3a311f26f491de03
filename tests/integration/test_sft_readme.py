"""The README's fine-tuning for a laptop is run as it is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.tracking.jsonl import read_jsonl

ROOT = Path(__file__).parents[2]


def test_the_commands_make_rows_and_a_model_and_train_it_as_the_text_says(tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text().partition("## Supervised fine-tuning")[2].partition("\n## ")[0]
    (commands,) = (block for block in re.findall(r"```bash\n(.*?)```", section, re.DOTALL) if "<<" in block)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", commands],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stdout + done.stderr
    assert len((tmp_path / "sums.jsonl").read_text().splitlines()) == 20
    out = tmp_path / "checkpoint" / "sums"
    losses = [line["loss/train"] for line in read_jsonl(out / "metrics.jsonl")]
    assert 3 < losses[0] < 5 and losses[-1] < 1
    assert (out / "report.html").is_file()
    AutoTokenizer.from_pretrained(out)
    assert 0.7e6 < AutoModelForCausalLM.from_pretrained(out).num_parameters() < 0.9e6
