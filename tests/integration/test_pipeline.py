"""Fine-tuning, a reward model, its server, PPO of adapters against it and merging, all with public commands."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.tracking.jsonl import read_jsonl

SCRIPT = Path(__file__).parents[2] / "examples/pipeline_cpu.sh"
TIMEOUT_S = 540


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 30)
def test_the_whole_way_runs_with_public_commands_and_the_judge_tells_sums_from_letters(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with (tmp_path / "log.txt").open("w+") as log:
        # Into a file: a server that outlived the script would hold a pipe open.
        process = subprocess.Popen(
            ["bash", str(SCRIPT)],
            cwd=tmp_path,
            env={**os.environ, "PATH": path, "PORT": str(port)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            status = process.wait(TIMEOUT_S)
        finally:
            process.terminate()
            process.wait(30)
        printed = (tmp_path / "log.txt").read_text()
    assert status == 0, printed[-3000:]
    out = tmp_path / "outputs/pipeline"
    sft, rm, ppo = (read_jsonl(out / name / "metrics.jsonl") for name in ("sft", "rm", "ppo"))
    assert sft[-1]["loss/train"] < sft[0]["loss/train"] - 1 and rm[-1]["accuracy/train"] > 0.9
    assert [line["step"] for line in ppo] == [1, 2]
    for line in ppo:
        assert line["reward/failed"] == 0 and line["reward/std"] > 0
        assert line["actor/updates"] == line["critic/updates"] == 1
    assert ppo[0]["kl/reference"] == pytest.approx(0, abs=1e-6)
    judge = AutoModelForSequenceClassification.from_pretrained(out / "rm")
    assert judge.config.std > 0 and AutoTokenizer.from_pretrained(out / "merged").chat_template
    before, after = (load_file(out / name / "model.safetensors") for name in ("sft", "merged"))
    changed = {name for name in before if not before[name].equal(after[name])}
    assert before.keys() == after.keys() and changed and all(name.endswith("_proj.weight") for name in changed)
    answers = [float(reward) for reward in re.findall(r"07\+35= .* reward (-?\d+\.\d+)", printed)]
    assert len(answers) == 3 and answers[1] > answers[2]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_port_that_is_taken_ends_the_script_before_it_trains(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = str(held.getsockname()[1])
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", str(SCRIPT)],
            cwd=tmp_path,
            env={**os.environ, "PATH": path, "PORT": port},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert done.stderr == f"Port {port} cannot be listened on, which another server may do; give a free one as PORT.\n"
