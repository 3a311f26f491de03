"""Settings of the quickstart, which is no training command but calls two of them."""

from __future__ import annotations

from dataclasses import dataclass

from openrlhf.config.errors import ConfigError

PROBLEMS = 2048
SFT_BATCH = 128
RL_PROMPTS_PER_STEP = 64
SAVE_EVERY = 10


@dataclass(frozen=True)
class QuickstartConfig:
    """Make a small model, teach it to add by SFT and then by RL, and test it."""

    output_dir: str = "outputs/quickstart"
    """Folder for everything that is made: data, models, metrics, reports."""
    sft_steps: int = 240
    """Optimizer steps of SFT, at most; above 16 rounded up to whole passes over the data."""
    rl_steps: int = 96
    """Steps of RL; above 32 rounded up to whole passes over the data."""
    seed: int = 1
    """Seed of the data, the model and both trainings."""

    def __post_init__(self) -> None:
        for name, value in (("sft_steps", self.sft_steps), ("rl_steps", self.rl_steps)):
            if value < 1:
                raise ConfigError(f"--{name} {value}: give 1 or more.")

    @property
    def sft_rows(self) -> int:
        """Worked examples of SFT."""
        return min(PROBLEMS, self.sft_steps * SFT_BATCH)

    @property
    def sft_epochs(self) -> int:
        """Passes over the worked examples."""
        return -(-self.sft_steps * SFT_BATCH // self.sft_rows)

    @property
    def rl_prompts(self) -> int:
        """Prompts of RL."""
        return min(PROBLEMS, self.rl_steps * RL_PROMPTS_PER_STEP)

    @property
    def rl_episodes(self) -> int:
        """Passes over the prompts."""
        return -(-self.rl_steps * RL_PROMPTS_PER_STEP // self.rl_prompts)
