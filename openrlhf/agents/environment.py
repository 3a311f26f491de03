"""Reads what an environment's ``reset`` and ``step`` return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from openrlhf.agents.base import AgentError
from openrlhf.agents.values import number, number_logs, optional_number, truth, whole_text


@dataclass(frozen=True)
class Turn:
    """What the environment made of one action.

    Attributes:
        reward: of this turn alone.
        score: None where the turn gave none.
        feedback: text that follows the action.
        done: the sample ends here.
        sampling_params: for the following turns; None leaves them as they are.
    """

    reward: float
    score: float | None
    feedback: str
    done: bool
    sampling_params: Any = None
    extra_logs: dict[str, float] = field(default_factory=dict)


def read_observation(returned: Any, where: str) -> str:
    """The ``observation`` of ``reset()``.

    Args:
        where: names the method in errors.

    Raises: AgentError.
    """
    observation = _entry(returned, "observation", where)
    _refuse_images(returned, where)
    if not isinstance(observation, str):
        raise AgentError(f"{where}: 'observation' is {type(observation).__name__}, not text")
    if not observation:
        raise AgentError(f"{where}: 'observation' is empty, so there is nothing to go on from")
    try:
        return whole_text("observation", observation)
    except AgentError as error:
        raise AgentError(f"{where}: {error}") from error


def read_turn(returned: Any, where: str) -> Turn:
    """What ``step()`` returned.

    Args:
        where: names the method in errors.

    Raises: AgentError, naming the key, what was found and what is expected.
    """
    rewards, done = _entry(returned, "rewards", where), _entry(returned, "done", where)
    _refuse_images(returned, where)
    if rewards is None:
        raise AgentError(f"{where}: 'rewards' is None; give 0.0 where the turn earned nothing")
    try:
        ended = truth("done", done)
        feedback = returned.get("environment_feedback")
        if feedback is None and not ended:
            raise AgentError("'environment_feedback' is missing and 'done' is false: give text, which may be empty")
        if feedback is not None and not isinstance(feedback, str):
            raise AgentError(f"'environment_feedback' is {type(feedback).__name__}, not text")
        return Turn(
            reward=number("rewards", rewards),
            score=optional_number("scores", returned.get("scores")),
            feedback=whole_text("environment_feedback", feedback or ""),
            done=ended,
            sampling_params=returned.get("sampling_params"),
            extra_logs=number_logs(returned.get("extra_logs")),
        )
    except AgentError as error:
        raise AgentError(f"{where}: {error}") from error


def _entry(returned: Any, key: str, where: str) -> Any:
    if not isinstance(returned, dict):
        raise AgentError(f"{where} returned {type(returned).__name__}, not a dict")
    if key not in returned:
        raise AgentError(f"{where}: no '{key}' in what was returned, only {sorted(map(str, returned)) or 'nothing'}")
    return returned[key]


def _refuse_images(returned: dict[str, Any], where: str) -> None:
    images = returned.get("environment_images")
    if images is not None and len(images):
        raise AgentError(f"{where}: 'environment_images' holds images, and vision models are not supported yet")
