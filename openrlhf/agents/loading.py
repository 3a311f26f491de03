"""Loads the agent file of ``--train.agent_func_path``."""

from __future__ import annotations

import sys
from pathlib import Path

from openrlhf.agents.base import AgentExecutorBase
from openrlhf.agents.isolated import IsolatedExecutor
from openrlhf.agents.multi_turn import MultiTurnAgentExecutor
from openrlhf.agents.user_file import UserFileError, describe, import_file
from openrlhf.config.errors import ConfigError

CLASS = "AgentExecutor"
_FLAG = "--train.agent_func_path"


def load_executor(agent_func_path: str | Path) -> AgentExecutorBase:
    """Makes the executor of an agent file; files beside it can be imported by it.

    An executor with an ``execute()`` of its own runs in a thread of its own, as do the environments of a multi-turn
    one: what blocks there blocks neither the engine nor the samples' time-outs.

    Raises: ConfigError, one sentence: no such file, it cannot be imported, it has no class ``AgentExecutor``, that is
        no executor, or it cannot be made without arguments.
    """
    path = Path(agent_func_path).absolute()
    # Behind all others, unlike a script's own folder: a file there must not stand in for a module of the engine.
    if path.is_file() and str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        module = import_file(path, f"agent_file_{path.stem}")
    except UserFileError as error:
        raise ConfigError(f"{_FLAG}: {error}") from error
    found = vars(module).get(CLASS)
    if found is None:
        raise ConfigError(f"{_FLAG}: {path} has no class {CLASS}; derive one from MultiTurnAgentExecutor")
    if not isinstance(found, type) or not issubclass(found, AgentExecutorBase):
        raise ConfigError(f"{_FLAG}: {CLASS} in {path} is no subclass of AgentExecutorBase or MultiTurnAgentExecutor")
    try:
        executor = found()
    except BaseException as error:
        raise ConfigError(f"{_FLAG}: {CLASS}() cannot be made: {describe(error, path)}") from error
    if isinstance(executor, MultiTurnAgentExecutor) and not executor.ready:
        raise ConfigError(f"{_FLAG}: {CLASS}.__init__() in {path} does not call super().__init__(its instance class)")
    if not isinstance(executor.retries, int) or executor.retries < 0:
        raise ConfigError(f"{_FLAG}: {CLASS}.retries in {path} is {executor.retries!r}, not a number of further tries")
    longest = executor.longest_block
    if isinstance(longest, bool) or not isinstance(longest, int | float) or not longest > 0:
        raise ConfigError(f"{_FLAG}: {CLASS}.longest_block in {path} is {longest!r}, not a number of seconds above 0")
    own = found.execute is not MultiTurnAgentExecutor.execute
    return IsolatedExecutor(executor) if own else executor
