"""Processes of an engine end with the process that owns them, at whatever point of their start it goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(280)

ROOT = Path(__file__).parents[2]
# The engine waits for the second of two nodes, which never comes.
ENGINE = """
import sys
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.vllm_engine import VllmEngine

spec = EngineSpec(
    model=sys.argv[1], dtype="float32", max_model_len=64, seed=0, max_num_seqs=2, kv_cache_bytes=2**26,
    tensor_parallel_size=2, extra={"nnodes": 2, "distributed_executor_backend": "mp"},
)
VllmEngine(spec)
"""


def wait_for(condition: Callable[[], object], seconds: float) -> bool:
    """Returns: whether it came about within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def test_an_engine_that_still_waits_for_its_workers_ends_with_its_killed_owner(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2", hidden=128)
    log = tmp_path / "log.txt"
    with log.open("w") as output:
        owner = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(model)],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    started = psutil.Process(owner.pid)

    def meets() -> bool:
        return any("VLLM::Worker" in " ".join(child.cmdline()) for child in started.children(recursive=True))

    left: list[psutil.Process] = []
    try:
        assert wait_for(lambda: owner.poll() is not None or meets(), 200), log.read_text()[-3000:]
        assert owner.poll() is None, log.read_text()[-3000:]
        left = started.children(recursive=True)
        owner.send_signal(signal.SIGKILL)
        owner.wait(30)
        _, alive = psutil.wait_procs(left, timeout=60)
        assert alive == []
    finally:
        owner.kill()
        for process in left:
            if process.is_running():
                process.kill()
