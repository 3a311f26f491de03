"""A second and a third try at a reasoning-gym question, each scored by reasoning-gym itself; works for every task."""

from __future__ import annotations

from typing import Any

from reasoning_gym import get_score_answer_fn

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

MAX_TRIES = 3
# A later success is worth less than an early one.
DISCOUNT = 0.7
END = "<|im_end|>"
RETRY = "\n<|im_start|>user\nThat is not right. Answer again, with the answer alone.<|im_end|>\n<|im_start|>assistant\n"


class Retries(AgentInstanceBase):
    """One question; the label is its entry in the data set."""

    def __init__(self) -> None:
        self.tries = 0
        self.best = 0.0

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Begins with the prompt as it is, and finds the task's scorer."""
        self.score = get_score_answer_fn(states["label"]["metadata"]["source_dataset"])
        return {"observation": states["observation"]}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Scores one answer; a turn earns what it is better than the best one before it."""
        action = states["action_text"]
        score = float(self.score(action.removesuffix(END).strip(), states["label"]))
        earned = DISCOUNT**self.tries * max(0.0, score - self.best)
        self.tries += 1
        self.best = max(self.best, score)
        right = score == 1.0
        done = right or self.tries >= MAX_TRIES
        closed = "" if action.endswith(END) else END
        return {
            "rewards": earned,
            "scores": float(right),
            "environment_feedback": "" if done else closed + RETRY,
            "done": done,
            "extra_logs": {"tries": self.tries, "right_at_once": right and self.tries == 1},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    """What --train.agent_func_path looks for."""

    def __init__(self) -> None:
        super().__init__(Retries)
