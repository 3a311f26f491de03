"""The classes that users' agent files import."""

from openrlhf.agents.base import AgentExecutorBase
from openrlhf.agents.multi_turn import AgentInstanceBase, MultiTurnAgentExecutor
from openrlhf.agents.single_turn import SingleTurnAgentExecutor

__all__ = ["AgentExecutorBase", "AgentInstanceBase", "MultiTurnAgentExecutor", "SingleTurnAgentExecutor"]
