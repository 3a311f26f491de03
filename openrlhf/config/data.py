"""What is trained on: the `data` and `eval` groups."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenizerConfig:
    """How text becomes tokens."""

    max_len: int = 2048
    """Longest row in tokens, prompt and response together."""
    disable_fast_tokenizer: bool = False
    """Use the tokenizer's slow implementation."""


@dataclass(frozen=True)
class CorpusConfig(TokenizerConfig):
    """What all training data sets share."""

    input_template: str | None = None
    """Text with one slot {} that a prompt is put into; the alternative to a chat template."""
    apply_chat_template: bool = False
    """Render conversations with the tokenizer's chat template."""
    dataloader_num_workers: int = 0
    """Processes in which each rank tokenises rows (at the start; under --data.streaming the next steps' ahead) and RL
    checks prompts; 0 takes no others."""


@dataclass(frozen=True)
class SupervisedDataConfig(CorpusConfig):
    """Training data of the supervised commands."""

    dataset: str | None = None
    """Training data: comma-separated files, folders or hub names, each with an optional @split."""
    dataset_probs: str | None = None
    """Comma-separated probabilities with which the data sets are mixed."""
    dataset_split: str = "train"
    """Split of data sets that name none."""
    max_samples: int = 1_000_000
    """Rows to use at most."""
    streaming: bool = False
    """Tokenise rows when their turn comes instead of all at the start, so that no more of them than a step needs are
    held in memory."""
    tokenizer_chat_template: str | None = None
    """Jinja chat template that replaces the tokenizer's own."""


@dataclass(frozen=True)
class SFTDataConfig(SupervisedDataConfig):
    """Training data of SFT."""

    input_template: str | None = "User: {}\nAssistant: "
    """Text with one slot {} that a prompt is put into; the alternative to a chat template."""
    input_key: str = "input"
    """Column of the prompt or the conversation."""
    output_key: str | None = None
    """Column of the response; unset takes the last turn of the conversation in the input column."""
    multiturn: bool = False
    """Train on every assistant turn of a conversation instead of on the last."""


@dataclass(frozen=True)
class PreferenceDataConfig(SupervisedDataConfig):
    """Pairs of responses."""

    max_len: int = 512
    """Longest row in tokens, prompt and response together."""
    prompt_key: str | None = None
    """Column of the prompt; unset means that both responses contain it."""
    chosen_key: str = "chosen"
    """Column of the better response."""
    rejected_key: str = "rejected"
    """Column of the worse response."""


@dataclass(frozen=True)
class PromptDataConfig(CorpusConfig):
    """Prompts of RL."""

    prompt_dataset: str | None = None
    """Prompts: comma-separated files, folders or hub names, each with an optional @split."""
    prompt_probs: str | None = None
    """Comma-separated probabilities with which the prompt sets are mixed."""
    prompt_split: str = "train"
    """Split of prompt sets that name none."""
    max_samples: int = 100_000_000
    """Prompts to use at most."""
    input_key: str = "input"
    """Column of the prompt: text, or a list of messages."""
    label_key: str | None = None
    """Column that is handed to the reward function as label, whatever its JSON type."""
    image_key: str = "images"
    """Column of the images of vision-language prompts."""
    max_images_per_prompt: int = 0
    """Images that a prompt may hold; 0 trains on text alone."""


@dataclass(frozen=True)
class SupervisedEvalConfig:
    """Evaluation on held-out rows."""

    dataset: str | None = None
    """Evaluation data, in the forms of the training data."""
    split: str = "train"
    """Split of evaluation data sets that name none."""
    steps: int = -1
    """Optimizer steps between evaluations; -1 never."""


@dataclass(frozen=True)
class DPOEvalConfig(SupervisedEvalConfig):
    """Evaluation on held-out pairs."""

    split: str = "test"
    """Split of evaluation data sets that name none."""


@dataclass(frozen=True)
class EvalConfig(SupervisedEvalConfig):
    """Evaluation by generating answers to held-out prompts."""

    steps: int = -1
    """Rollout steps between evaluations; -1 never."""
    temperature: float = 0.6
    """Sampling temperature of evaluation."""
    n_samples_per_prompt: int = 4
    """Answers that evaluation samples for each prompt."""


@dataclass(frozen=True)
class ServeDataConfig(TokenizerConfig):
    """Requests of the reward server."""
