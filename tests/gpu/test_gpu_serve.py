"""The reward-model server on a GPU: the command as users start it, and the scores of transformers."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.serve_room import make_reward_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600, func_only=True)]

ROOT = Path(__file__).parents[2]
START_S = 300
TEXTS = ["hello world", "one two three four five", "what is 1 + 2 ? the answer is 3 .", "red green blue " * 8]


def post(url: str, body: dict[str, list[str]]) -> list[float]:
    """Asks once the server is ready."""
    deadline = time.monotonic() + START_S
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)["rewards"]
        except urllib.error.URLError:
            # Refused while it imports, 503 while it loads.
            assert time.monotonic() < deadline
            time.sleep(0.5)


@pytest.mark.parametrize(("param_dtype", "tolerance"), [("fp32", 1e-3), ("bf16", 0.5)])
def test_the_server_on_a_gpu_gives_the_scores_of_transformers(param_dtype: str, tolerance: float, tmp_path: Path):
    folder = make_reward_model(tmp_path / "rm", "qwen3", head_dim=64)
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    words = ["--reward.model_name_or_path", str(folder), "--ds.param_dtype", param_dtype, "--port", str(port)]
    process = subprocess.Popen(
        [sys.executable, "-m", "openrlhf.cli.serve_rm", *words, "--device", "cuda", "--data.max_len", "256"], cwd=ROOT
    )
    try:
        rewards = post(f"http://127.0.0.1:{port}/get_reward", {"query": TEXTS})
        process.terminate()
        assert process.wait(60) == 143
    finally:
        process.kill()
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        rows = [tokenizer(text, return_tensors="pt")["input_ids"] for text in TEXTS]
        expected = [model(row).logits.item() for row in rows]
    assert max(expected) - min(expected) > 2 * tolerance
    assert rewards == pytest.approx(expected, abs=tolerance)
