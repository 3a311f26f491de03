"""A number-guessing game: the policy guesses, the game says higher or lower, in the chat format of SmolLM2 and Qwen."""

from __future__ import annotations

import re
from typing import Any

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

LOW, HIGH = 1, 32
MAX_GUESSES = 6
END = "<|im_end|>"

# A guess that fits what was said before earns a little, so that there is something to learn before the first win.
SENSIBLE, RIGHT = 0.1, 1.0


class GuessingGame(AgentInstanceBase):
    """One game; the label is the number to guess."""

    def __init__(self) -> None:
        self.guesses = 0
        self.low, self.high = LOW, HIGH

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Begins with the prompt as it is."""
        return {"observation": states["observation"]}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Answers one guess."""
        self.guesses += 1
        action, secret = states["action_text"], int(states["label"])
        numbers = re.findall(r"\d{1,9}", action)
        guess = int(numbers[0]) if numbers else None
        won = guess == secret
        sensible = guess is not None and self.low <= guess <= self.high
        if guess is None:
            said = f"Answer with a number from {LOW} to {HIGH}."
        elif guess < secret:
            self.low = max(self.low, guess + 1)
            said = f"My number is higher than {guess}."
        else:
            self.high = min(self.high, guess - 1)
            said = f"My number is lower than {guess}."
        done = won or self.guesses >= MAX_GUESSES
        return {
            "rewards": RIGHT if won else SENSIBLE * sensible,
            "scores": float(won),
            "environment_feedback": "" if done else user_turn(action, said),
            "done": done,
            "extra_logs": {"guesses": self.guesses, "won": won},
        }


def user_turn(action: str, text: str) -> str:
    """Returns: what follows the policy's turn, which has ended by itself unless its tokens ran out."""
    closed = "" if action.endswith(END) else END
    return f"{closed}\n<|im_start|>user\n{text}{END}\n<|im_start|>assistant\n"


class AgentExecutor(MultiTurnAgentExecutor):
    """What --train.agent_func_path looks for."""

    def __init__(self) -> None:
        super().__init__(GuessingGame)
