"""Reward files for tests: written on the spot, and asked through a source that is closed afterwards."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from openrlhf.agents.reward import PythonRewardSource

PREAMBLE = "import asyncio, os, signal, subprocess, sys, time\n"


def write(folder: Path, code: str) -> Path:
    """Returns: the file, which begins with the usual imports."""
    path = folder / "reward.py"
    path.write_text(PREAMBLE + textwrap.dedent(code))
    return path


def line_of(path: Path, text: str) -> int:
    """Returns: the number of the first line with ``text``."""
    return 1 + [text in line for line in path.read_text().splitlines()].index(True)


def use(path: Path, job: Callable[[PythonRewardSource], Awaitable[Any]], **options: Any) -> Any:
    """Runs ``job`` with a started source, which is closed afterwards."""

    async def main() -> Any:
        source = PythonRewardSource(path, **{"timeout": 20.0, "max_retries": 0, **options})
        try:
            await source.start()
            async with asyncio.timeout(60):
                return await job(source)
        finally:
            await source.close()

    return asyncio.run(main())


def score_one(path: Path, label: Any = None, **options: Any) -> Any:
    """Scores one sample."""
    return use(path, lambda source: source.score("question answer", "question", label), **options)


def score_many(path: Path, labels: list[Any], answers: list[str] | None = None, **options: Any) -> list[Any]:
    """Scores a sample for each label, all at once; the queries are the prompt "q" and then the answers or labels."""

    async def job(source: PythonRewardSource) -> list[Any]:
        pairs = zip(answers or labels, labels, strict=True)
        return await asyncio.gather(*[source.score(f"q{answer}", "q", label) for answer, label in pairs])

    return use(path, job, **options)
