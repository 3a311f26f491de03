"""Throughput of the reward-model server, with batching beside text by text, in one run.

    python benchmarks/serve_rm.py --device cpu --requests 400 --output serve_rm.json
    python benchmarks/serve_rm.py --model OpenRLHF/Llama-3-8b-rm-700k --length 2000 --clients 256 --device cuda

Two servers on the same model take turns under the same requests, so that what else the machine does meets both: one
batches (``--max_batch_tokens``), the other runs one text a forward (``--batch_size 1``).
Prints one line of JSON, and writes it where ``--output`` says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import torch
import transformers

from openrlhf.trainer.quickstart_task import make_model

START_S = 900.0
CHARACTERS = "0123456789+-= abcdefghijklmnopqrstuvwxyz"


def arguments() -> argparse.Namespace:
    """Returns: the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub name; unset makes the quickstart's model of 0.9M parameters")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--param_dtype", choices=("bf16", "fp16", "fp32"), default="fp32")
    parser.add_argument("--requests", type=int, default=400, help="of each round")
    parser.add_argument("--rounds", type=int, default=3, help="of each server, in turns; the first ones warm up")
    parser.add_argument("--texts", type=int, default=1, help="of a request")
    parser.add_argument("--length", type=int, default=100, help="characters of the longest text; half of it at least")
    parser.add_argument("--clients", type=int, default=64, help="that ask at once")
    parser.add_argument("--max_len", type=int, default=128, help="--data.max_len of the servers")
    parser.add_argument("--output", type=Path, help="file for the JSON")
    return parser.parse_args()


def small_model(folder: Path) -> str:
    """Writes the quickstart's model with a head at random. Returns: ``folder``."""
    make_model(folder, seed=0)
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    model.save_pretrained(folder)
    return str(folder)


@contextmanager
def server(model: str, args: argparse.Namespace, *flags: str) -> Iterator[str]:
    """A server process. Yields: its address, once it is ready.

    Raises: RuntimeError where it ends before.
    """
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    words = ["--reward.model_name_or_path", model, "--device", args.device, "--ds.param_dtype", args.param_dtype]
    words += ["--data.max_len", str(args.max_len), "--port", str(port), *flags]
    process = subprocess.Popen([sys.executable, "-m", "openrlhf.cli.serve_rm", *words], stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        asyncio.run(until_ready(url, process))
        yield url
    finally:
        process.terminate()
        process.wait(60)


async def until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Waits until a server has loaded its model."""
    async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
        while process.poll() is None:
            try:
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
    raise RuntimeError(f"the server ended with status {process.returncode} before it was ready")


async def load(url: str, work: list[list[str]], clients: int) -> dict[str, float]:
    """One round. Returns: its seconds, those of its requests at the median and the 99th percentile, and tokens."""
    todo = iter(work)
    seconds: list[float] = []

    async def client(session: aiohttp.ClientSession) -> None:
        for texts in todo:
            started = time.perf_counter()
            async with session.post(f"{url}/get_reward", json={"query": texts}) as response:
                body = await response.json()
                if response.status != 200:
                    raise RuntimeError(f"status {response.status}: {body}")
            seconds.append(time.perf_counter() - started)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        before = await tokens_scored(session, url)
        started = time.perf_counter()
        await asyncio.gather(*[client(session) for _ in range(clients)])
        took = time.perf_counter() - started
        tokens = await tokens_scored(session, url) - before
    ordered = sorted(seconds)
    return {
        "seconds": took,
        "texts_per_s": sum(map(len, work)) / took,
        "tokens_per_s": tokens / took,
        "median_request_s": statistics.median(ordered),
        "p99_request_s": ordered[int(0.99 * (len(ordered) - 1))],
    }


async def tokens_scored(session: aiohttp.ClientSession, url: str) -> float:
    """Returns: tokens that a server has scored so far."""
    async with session.get(f"{url}/metrics") as response:
        for line in (await response.text()).splitlines():
            if line.startswith("openrlhf_reward_tokens_total "):
                return float(line.split()[1])
    raise RuntimeError("the server counts no tokens")


def median_round(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Returns: the round of median throughput, without the first where there are several."""
    counted = sorted(rounds[1:] or rounds, key=lambda found: found["texts_per_s"])
    return counted[len(counted) // 2]


def measure(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Runs both servers in turns. Returns: the settings, the median round of each, and how much faster batching is."""
    rng = random.Random(0)
    lengths = (rng.randint(max(1, args.length // 2), args.length) for _ in range(args.requests * args.texts))
    texts = ["".join(rng.choices(CHARACTERS, k=length - 1)) + "." for length in lengths]
    work = [texts[start : start + args.texts] for start in range(0, len(texts), args.texts)]
    rounds: dict[str, list[dict[str, float]]] = {"batched": [], "one_by_one": []}
    with ExitStack() as stack:
        urls = {
            "batched": stack.enter_context(server(model, args)),
            "one_by_one": stack.enter_context(server(model, args, "--batch_size", "1")),
        }
        for _ in range(args.rounds):
            for name, url in urls.items():
                rounds[name].append(asyncio.run(load(url, work, args.clients)))
    found = {name: median_round(of_server) for name, of_server in rounds.items()}
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    return {
        "settings": {**settings, "model": args.model or "quickstart"},
        "machine": torch.cuda.get_device_name()
        if args.device == "cuda"
        else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **found,
        "speedup": found["batched"]["texts_per_s"] / found["one_by_one"]["texts_per_s"],
    }


def main() -> None:
    """Measures and writes."""
    args = arguments()
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, args.model or small_model(Path(folder)))
    line = json.dumps(found)
    if args.output is not None:
        args.output.write_text(line + "\n", encoding="utf-8")
    print(line)


if __name__ == "__main__":
    main()
