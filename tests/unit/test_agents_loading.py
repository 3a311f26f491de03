"""Agent files: which class is taken, where its code runs, and what is said of files that cannot be used."""

from __future__ import annotations

import asyncio
import re
import textwrap
from pathlib import Path

import pytest

from openrlhf.agents.isolated import IsolatedExecutor
from openrlhf.agents.loading import load_executor
from openrlhf.agents.multi_turn import MultiTurnAgentExecutor
from openrlhf.config.errors import ConfigError
from tests.agent_room import TalkingEngine, play

IMPORTS = (
    "from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor, "
    "SingleTurnAgentExecutor\n"
)
INSTANCE = """
class Instance(AgentInstanceBase):
    async def reset(self, states):
        return {"observation": states["observation"]}
    async def step(self, states):
        return {"rewards": 1.0, "done": True}
"""
EXECUTOR = """
class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Instance)
"""
CUSTOM = """
class AgentExecutor(AgentExecutorBase):
    retries = 3
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        raise ValueError("not today")
"""


def write(folder: Path, code: str, name: str = "agent.py") -> Path:
    path = folder / name
    path.write_text(IMPORTS + textwrap.dedent(code))
    return path


def test_a_multi_turn_executor_is_loaded_and_plays(tmp_path: Path) -> None:
    executor = load_executor(write(tmp_path, INSTANCE + EXECUTOR))
    assert isinstance(executor, MultiTurnAgentExecutor)
    assert asyncio.run(play(executor, TalkingEngine("a"))).reward == 1.0


def test_an_executor_with_its_own_execute_is_isolated_and_keeps_its_retries(tmp_path: Path) -> None:
    executor = load_executor(write(tmp_path, CUSTOM))
    assert isinstance(executor, IsolatedExecutor)
    assert executor.retries == 3
    failure = asyncio.run(play(executor, TalkingEngine("a"))).failure
    assert "ValueError: not today" in failure
    assert str(tmp_path / "agent.py") in failure
    assert failure.endswith("(in 4 tries)")


def test_a_multi_turn_executor_that_adds_to_execute_works_as_well(tmp_path: Path) -> None:
    code = """
    class AgentExecutor(MultiTurnAgentExecutor):
        def __init__(self):
            super().__init__(Instance)
        async def execute(self, **arguments):
            result = await super().execute(**arguments)
            result["extra_logs"]["mine"] = 1
            return result
    """
    executor = load_executor(write(tmp_path, INSTANCE + textwrap.dedent(code)))
    trajectory = asyncio.run(play(executor, TalkingEngine("a")))
    assert (trajectory.reward, trajectory.extra_logs) == (1.0, {"mine": 1.0})


def test_files_beside_the_agent_file_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "moves_of_this_game.py").write_text("MOVES = 3\n")
    code = "from moves_of_this_game import MOVES\nassert MOVES == 3\n" + INSTANCE + EXECUTOR
    load_executor(write(tmp_path, code))


def test_a_relative_path_is_taken_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, INSTANCE + EXECUTOR)
    monkeypatch.chdir(tmp_path)
    load_executor("agent.py")


UNUSABLE = [
    ("x = 1\n", r"has no class AgentExecutor"),
    ("AgentExecutor = 3\n", r"AgentExecutor in .*agent.py is no subclass of AgentExecutorBase"),
    ("class AgentExecutor: pass\n", r"is no subclass of AgentExecutorBase"),
    ("class AgentExecutor(AgentExecutorBase): pass\n", r"cannot be made: TypeError: .*abstract.*execute"),
    (INSTANCE + "class AgentExecutor(MultiTurnAgentExecutor): pass\n", r"cannot be made: TypeError: .*missing 1 requ"),
    (
        "class AgentExecutor(MultiTurnAgentExecutor):\n    def __init__(self):\n        super().__init__(dict)\n",
        r"takes a subclass of AgentInstanceBase, not <class 'dict'> \(at .*agent.py:4",
    ),
    ("class Instance(AgentInstanceBase): pass\n" + EXECUTOR, r"Instance has no reset, step\(\)"),
    (
        CUSTOM + "    def __init__(self):\n        raise OSError('no tools here')\n",
        r"OSError: no tools here \(at .*:8 in __",
    ),
    (CUSTOM + "    def __init__(self):\n        raise SystemExit(2)\n", r"SystemExit: 2 \(at"),
    (
        "class AgentExecutor(MultiTurnAgentExecutor):\n    def __init__(self):\n        pass\n",
        r"__init__\(\) in .*agent.py does not call super\(\).__init__",
    ),
    (CUSTOM.replace("= 3", "= {}"), r"AgentExecutor.retries in .* is {}, not a number of further tries"),
    (INSTANCE + "    threads = 0\n" + EXECUTOR, r"ValueError: Instance.threads is 0; int from 1 is expected"),
    (INSTANCE + "    retries = '2'\n" + EXECUTOR, r"ValueError: Instance.retries is '2'; int from 0 is expected"),
    (INSTANCE + "    step_timeout = 0\n" + EXECUTOR, r"Instance.step_timeout is 0; float from 0.001 is expected"),
    ("import no_such_module_anywhere\n", r"cannot be imported: ModuleNotFoundError: No module named 'no_such"),
    ("def broken(:\n", r"cannot be imported: SyntaxError: invalid syntax \(agent.py, line 2\)"),
    ("raise SystemExit(1)\n", r"cannot be imported: SystemExit: 1"),
]


@pytest.mark.parametrize(("code", "message"), UNUSABLE)
def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_executor(write(tmp_path, code))
    text = str(caught.value)
    assert text.startswith("--train.agent_func_path: ")
    assert re.search(message, text), text
    assert "\n" not in text


@pytest.mark.parametrize("name", ["missing.py", "."])
def test_a_path_that_is_no_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is not a file"):
        load_executor(tmp_path / name)


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a Python file"):
        load_executor(write(tmp_path, "", "agent.txt"))
