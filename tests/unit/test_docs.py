"""What the documents say is what the code does: metrics, and the README's reward function."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from openrlhf.agents.reward_values import RewardResult, read_rewards
from openrlhf.tracking.progress import PHASES
from openrlhf.tracking.report_data import LAYOUTS
from tests.tiny_models import make_tokenizer

ROOT = Path(__file__).parents[2]
DOCUMENTED = {
    name
    for line in (ROOT / "docs/metrics.md").read_text().splitlines()
    if line.startswith("| `")
    for name in re.findall(r"`([a-z_]+/[a-z_]+)`", line.split("|")[1])
}
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "openrlhf/trainer").glob("*.py")))


def test_every_documented_metric_is_computed():
    named = set(re.findall(r'"([a-z_]+/[a-z_]+)"', SOURCE))
    # Built from parts: the time of a phase, and what the supervised loop makes of a sum and of the data's part.
    named |= {f"{role}/{what}" for role, what in re.findall(r'f"\{(role)\}/([a-z_]+)"', SOURCE)}
    roles = ("actor", "critic")
    named |= {f"{role}/{name.removeprefix('role/')}" for name in named if name.startswith("role/") for role in roles}
    named |= {f"policy/{name}" for name in ("kl_loss", "entropy") if f'"{name}"' in SOURCE}
    named |= {f"time/{phase}" for phase in PHASES if f'"{phase}"' in SOURCE} | {"loss/train", "loss/eval"}
    assert len(DOCUMENTED) > 25
    assert DOCUMENTED - named == set()


def test_every_panel_of_the_report_shows_a_documented_metric():
    shown = {metric for layout in LAYOUTS for _, metric in layout.series} | {layout.band for layout in LAYOUTS} - {None}
    assert shown - DOCUMENTED == set()


@pytest.fixture(scope="module")
def reward_func() -> Any:
    block = next(
        text
        for text in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        if "def " in text
    )
    names: dict[str, Any] = {}
    exec(block, names)
    return names["reward_func"]


CHAT = "<|im_start|>user\nwhat is 12 + 30 ?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("query", "prompt", "label", "reward", "length"),
    [
        (CHAT + "it is 42<|im_end|>", CHAT, 42, 1.0, 18),
        # A BOS that the tokenizer puts in front of a raw prompt.
        ("<s>12 + 30 = 42</s>", "12 + 30 =", "42", 1.0, 7),
        # A prompt that lost its beginning to --data.max_len.
        (CHAT[25:] + "42", CHAT, 42, 1.0, 2),
        # The label stands in the prompt and in a longer number, and not in the answer.
        ("142 - 100 = 142", "142 - 100 =", 42, 0.0, 4),
        ("12 + 30 =", "12 + 30 =", 30, 0.0, 0),
        (CHAT + CHAT + "-42", CHAT + CHAT, -42, 1.0, 3),
    ],
)
def test_the_readmes_reward_reads_the_answer_and_nothing_else(reward_func, query, prompt, label, reward, length):
    (outcome,) = read_rewards(reward_func([query], [prompt], [label]), 1)
    assert outcome == RewardResult(reward=reward, score=reward, extra_logs={"answer_characters": float(length)})


def test_the_readmes_reward_gives_each_sample_of_a_batch_its_own_numbers(reward_func):
    first, second = read_rewards(reward_func(["1 + 1 = 2", "1 + 2 = 44"], ["1 + 1 =", "1 + 2 ="], [2, 3]), 2)
    assert (first.reward, first.extra_logs) == (1.0, {"answer_characters": 2.0})
    assert (second.reward, second.extra_logs) == (0.0, {"answer_characters": 3.0})


def test_what_the_readme_says_of_queries_holds_for_a_real_tokenizer(reward_func):
    tokenizer = make_tokenizer()
    tokens = tokenizer(CHAT + "42<|im_end|>", add_special_tokens=False)["input_ids"]
    query = tokenizer.decode(tokens[9:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert not query.startswith("<|im_start|>user") and query.endswith("<|im_start|>assistant\n42<|im_end|>")
    assert reward_func([query], [CHAT], [42])["rewards"] == [1.0]
