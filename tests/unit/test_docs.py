"""What the documents say is what the code does: metrics, flags, commands, and the README's own Python files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from openrlhf.agents.reward_values import RewardResult, read_rewards
from openrlhf.algorithms.preference_loss import PairLosses, pair_metrics
from openrlhf.backends.base import StepResult
from openrlhf.config import COMMANDS, Config, ConfigError, RMModelConfig, check, notes, parse
from openrlhf.config.flags import flags_of
from openrlhf.config.settings import lookup
from openrlhf.config.unbuilt import FLAGS
from openrlhf.data.packed_batch import PackedBatch
from openrlhf.data.preference import PreferenceDataset, PreferenceFormat
from openrlhf.data.trajectory import Segment, Trajectory
from openrlhf.tracking.report_data import LAYOUTS
from openrlhf.trainer.evaluation import evaluation_metrics
from openrlhf.trainer.rm import RewardObjective
from tests.agent_room import play_file, text_of
from tests.tiny_models import make_tokenizer

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "openrlhf/trainer").glob("*.py")))

METRIC_ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGES["metrics.md"].splitlines()
    if line.startswith("| `")
]
DOCUMENTED = {
    name
    for first, *_ in METRIC_ROWS
    for name in re.findall(r"`([a-z_]+/[a-z_0-9]+)`", first.replace("<source>", "default").replace("<N>", "4"))
}


class ScoringNothing:
    """A rank whose model scores every row 0."""

    device = torch.device("cpu")

    def row_scores(self, batch: PackedBatch) -> torch.Tensor:
        return torch.zeros(batch.num_rows)


def logged() -> set[str]:
    """The metrics that the code logs, by the names in its text; those of evaluation by evaluating."""
    literal = set(re.findall(r'"([a-z_]+/[a-z_]+)"', SOURCE))
    roles = re.findall(r'\.summary\("(\w+)"\)', SOURCE)
    by_role = {f"{role}/{name}" for role in roles for name in re.findall(r'f"\{role\}/(\w+)"', SOURCE)}
    by_role |= {name for role in roles for name in StepResult(1.0, False, 1e-2, 1e-6).rate_metrics(role)}
    phases = {f"time/{phase}" for phase in re.findall(r'\._phase\("(\w+)"', SOURCE)}
    (optional,) = re.findall(r'f"policy/\{name\}".*? for name in \((.*?)\)', SOURCE)
    policy = {f"policy/{name}" for name in re.findall(r'"(\w+)"', optional)}
    rows = [{"chosen": "yes", "rejected": "no", "__source__": "here", "__row__": 1}]
    pairs = PreferenceDataset(rows, make_tokenizer(), PreferenceFormat(), max_len=9)
    of_pairs = RewardObjective(pairs, RMModelConfig(), 0)
    _, extra = of_pairs.loss(ScoringNothing(), of_pairs.pack([0]), 1)
    parts = re.findall(r'\.reduced\("(\w+)"\)', SOURCE)
    one = torch.ones(1)
    compared = pair_metrics(PairLosses(one, one, one), one)
    losses = {f"{name}/{part}" for part in parts for name in ("loss", *extra, *compared)}
    samples = [
        Trajectory(0, i, "p", None, [Segment([1, 2], [(1, 2)])], reward=1.0, score=1.0, datasource="default")
        for i in range(4)
    ]
    return literal | by_role | phases | policy | losses | set(evaluation_metrics(samples, 4, with_pass_rates=True))


def test_the_metrics_that_are_documented_are_those_that_are_logged() -> None:
    computed = logged()
    assert len(computed) > 50
    assert DOCUMENTED - computed == set(), "documented and never logged"
    assert computed - DOCUMENTED == set(), "logged and not documented"


def test_every_metric_has_unit_meaning_and_what_a_bad_value_looks_like() -> None:
    assert [row for row in METRIC_ROWS if len(row) != 4 or not all(row)] == []


def test_every_panel_of_the_report_shows_a_documented_metric():
    shown = {metric for layout in LAYOUTS for _, metric in layout.series} | {layout.band for layout in LAYOUTS} - {None}
    assert shown - DOCUMENTED == set()


# Of pip, ray and the launchers, and the one that every command has.
FOREIGN = {"no-deps", "head", "num-cpus", "address", "runtime-env-json", "module", "num_gpus", "help"}


def flags_in(text: str) -> Iterator[str]:
    """Yields: our flags and groups of flags that a text names, without dashes."""
    for name in re.findall(r"(?<![\w-])--([a-z][\w.-]*)", text):
        if name not in FOREIGN:
            yield name.rstrip(".")


def exists(name: str) -> bool:
    """Whether any command has a flag, or a group of flags, of this name."""
    for tree in COMMANDS.values():
        flags = flags_of(tree)
        if any(flag.startswith(f"{name}.") for flag in flags):
            return True
        try:
            lookup(name, flags, name)
            return True
        except ConfigError:
            continue
    return False


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_that_a_page_names_exists(page: str) -> None:
    assert sorted({name for name in flags_in(PAGES[page]) if not exists(name)}) == []


@pytest.mark.parametrize("page", PAGES)
def test_a_flag_that_is_not_built_is_named_as_such(page: str) -> None:
    unbuilt = FLAGS.keys()
    chunks = [" ".join(chunk.split()) for chunk in re.split(r"\n\n|\n- |\n\|", PAGES[page])]
    silent = [chunk for chunk in chunks if "not built" not in chunk.lower() and unbuilt & set(flags_in(chunk))]
    assert silent == []


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_to_something(page: str) -> None:
    folder = ROOT if page == "README.md" else ROOT / "docs"
    links = [link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]) if "://" not in link]
    assert [path for path, _, _ in links if not (folder / path).exists()] == []
    for path, _, anchor in links:
        target = (folder / path).read_text() if path and anchor else PAGES[page]
        headings = [re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in target.splitlines()]
        assert not anchor or anchor in headings


def python_files() -> dict[str, str]:
    """The README's Python files, by the name in their first line."""
    blocks = re.findall(r"```python\n(# (\S+\.py)\n.*?)```", README, re.DOTALL)
    return {name: text for text, name in blocks}


def commands() -> list[tuple[str, list[str]]]:
    """The README's commands: name and words, which end with dots where further flags are left to the reader."""
    found = []
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            match = re.search(r"\bopenrlhf(?:\.cli\.| )(\w+) (.*)", line)
            if match:
                found.append((match[1], shlex.split(match[2])))
    return found


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of somebody who has what the README's commands name, as far as the checks look."""
    monkeypatch.chdir(tmp_path)
    for folder in ("checkpoint/sft", "checkpoint/rm", "reward-model", "outputs/laptop/model", "outputs/laptop/sft"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    for name, text in python_files().items():
        (tmp_path / name).write_text(text)
        (tmp_path / "outputs/laptop" / name).write_text(text)
    return tmp_path


def accept(command: str, words: list[str]) -> Config:
    """The config of a command in which every flag has its own name, passes the checks and has an effect."""
    said: list[str] = []
    config = parse(command, words, note=said.append)
    check(config)
    assert [note for note in said + notes(config) if "no effect" in note or "read as" in note] == []
    return config


def test_the_readmes_commands_are_all_found() -> None:
    adapters = ["train_sft", "train_ppo_ray", "lora_combiner", "train_sft", "lora_combiner"]
    others = ["train_rm", "serve_rm", "train_dpo", *adapters]
    assert [command for command, _ in commands()] == ["train_sft"] * 2 + others + ["train_ppo_ray"] * 9


@pytest.mark.usefixtures("bitsandbytes_is_found")
@pytest.mark.parametrize(("command", "words"), commands())
def test_a_command_of_the_readme_is_accepted(command: str, words: list[str], reader: Path) -> None:
    if words[-1] != "...":
        accept(command, words)
        return
    # The reader's own flags, taken from the first command that is whole.
    words, whole = words[:-1], next(words for name, words in commands() if name == command and words[-1] != "...")
    (reader / "held_out.jsonl").touch()
    accept(command, [*whole, *words])


def algorithms() -> list[list[str]]:
    """The flags of each row of the README's table of algorithms; a row may name several values of its last flag."""
    table = README.partition("| to run | flags |")[2].partition("\n\n")[0]
    found = []
    for line in table.splitlines()[2:]:
        first, *others = re.findall(r"`([^`]+)`", line.split("|")[2])
        words = first.split()
        found += [words, *([*words[:-1], other] for other in others)]
    return found


@pytest.mark.parametrize("words", algorithms(), ids=" ".join)
def test_an_algorithm_of_the_readme_is_accepted(words: list[str], reader: Path) -> None:
    base = "--actor.model_name_or_path ./checkpoint/sft --reward.remote_url reward_func.py "
    sizes = "--data.prompt_dataset prompts.jsonl --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 512"
    accept("train_ppo_ray", [*base.split(), *sizes.split(), *words])


def test_the_readmes_agent_plays_until_it_is_right(reader: Path) -> None:
    trajectory, engine = play_file(reader / "agent.py", "4", "3", label=3)
    assert trajectory.step_rewards == [0.0, 0.5] and trajectory.score == 1.0
    assert trajectory.extra_logs == {"turns": 2.0} and len(engine.requests) == 2
    assert "4<|im_end|>\nThat is wrong. Another try: 3" in text_of(trajectory)[0]
    never, _ = play_file(reader / "agent.py", "4", "5", "6", label=3)
    assert never.step_rewards == [0.0] * 3 and never.score == 0.0 and not never.truncated


@pytest.fixture(scope="module")
def reward_func() -> Any:
    names: dict[str, Any] = {}
    exec(python_files()["reward_func.py"], names)
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
