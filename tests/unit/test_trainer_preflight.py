"""What an RL run's models must allow, found out before any process is started."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from openrlhf.config import ConfigError, PPOConfig
from openrlhf.models.loading import load_tokenizer
from openrlhf.trainer import preflight
from openrlhf.trainer.preflight import other_token, policy_tokens, text_tokens
from tests.tiny_models import END_ID, PAD_ID, make_tiny_model, make_tokenizer
from tests.unit.config_args import built
from tests.unit.test_models_value_head import with_head

BASE = {"--data.prompt_dataset": "rows.jsonl", "--data.max_len": "96", "--device": "cpu"}


RENAMED = (10, "(", ")")


def renamed_tokenizer() -> Any:
    """The tokenizer of the tiny models with two tokens in each other's place."""
    tokenizer = make_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    names = {number: token for token, number in vocabulary.items()}
    vocabulary[names[10]], vocabulary[names[11]] = 11, 10
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    return tokenizer


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    make_tiny_model(root / "actor")
    with_head(root / "judge")
    with_head(root / "short", max_position_embeddings=64)
    with_head(root / "wide_head")
    save_file({**load_file(root / "wide_head" / "model.safetensors"), "score.weight": torch.zeros(2, 64)},
              root / "wide_head" / "model.safetensors")  # fmt: skip
    with_head(root / "foreign")
    renamed_tokenizer().save_pretrained(root / "foreign")
    # A smaller vocabulary, which the policy's begins with.
    with_head(root / "smaller", vocab_size=300)
    make_tokenizer(300).save_pretrained(root / "smaller")
    # Another vocabulary, and as many embeddings as it has entries.
    make_tiny_model(root / "few", vocab=300)
    make_tokenizer(512).save_pretrained(root / "few")
    (root / "broken").mkdir()
    (root / "broken" / "config.json").write_text((root / "actor" / "config.json").read_text())
    make_tokenizer().save_pretrained(root / "broken")
    (root / "broken" / "model.safetensors").write_bytes(b"no weights")
    return root


def config_of(models: Path, *flags: str) -> PPOConfig:
    actor = {"--actor.model_name_or_path": str(models / "actor")}
    words = [str(models / word[1:]) if word.startswith("@") else word for word in flags]
    config = built("train_ppo_ray", {**actor, **BASE}, *words)
    assert isinstance(config, PPOConfig)
    return config


JUDGE = ("--reward.model_name_or_path", "@judge")


@pytest.mark.parametrize(
    "flags",
    [
        (),
        JUDGE,
        ("--critic.model_name_or_path", "@judge"),
        ("--critic.model_name_or_path", "@actor", "--critic.fresh_head"),
        ("--algo.advantage.estimator", "rloo", "--reward.model_name_or_path", "@foreign"),
        # What is not started is not looked at.
        ("--algo.advantage.estimator", "rloo", "--critic.model_name_or_path", "@broken"),
    ],
)
def test_models_that_fit_are_let_through(models: Path, flags: tuple[str, ...]) -> None:
    preflight.run(config_of(models, *flags))


@pytest.mark.parametrize(
    ("ends", "flags", "told"),
    [
        ({"tokenizer": END_ID, "generation": END_ID}, ("--data.apply_chat_template",), False),
        ({"tokenizer": PAD_ID, "generation": [7, END_ID]}, ("--data.apply_chat_template",), False),
        ({"tokenizer": END_ID, "generation": 7}, ("--data.apply_chat_template",), False),
        ({"tokenizer": PAD_ID, "config": END_ID}, ("--data.apply_chat_template",), False),
        ({"tokenizer": PAD_ID, "config": 7}, ("--data.apply_chat_template",), True),
        ({"tokenizer": PAD_ID, "generation": 7, "config": END_ID}, ("--data.apply_chat_template",), True),
        ({"tokenizer": PAD_ID, "generation": 7}, (), False),
    ],
)
def test_an_end_of_turn_at_which_engines_do_not_stop_is_told(
    ends: dict[str, Any], flags: tuple[str, ...], told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_model(tmp_path / "actor")
    tokenizer = make_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends["tokenizer"])
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": ends.get("config", 7)}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if "generation" in ends:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends["generation"]}))
    preflight.run(config_of(tmp_path, *flags, "--algo.advantage.estimator", "rloo"))
    said = capsys.readouterr().err
    assert ("ends a turn with '<|im_end|>', and engines do not stop there" in said) == told, said


USERS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|im_start|>{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
)
TWICE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}<pad><|im_end|>{% endfor %}"


OPENING = "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }} end {% endfor %}<|im_start|>assistant "
DIVIDES = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}{{ 1 / (messages | length - 2) }}"


@pytest.mark.parametrize(
    ("template", "eos"),
    [(USERS, PAD_ID), (TWICE, END_ID), (OPENING, PAD_ID), (DIVIDES, PAD_ID)],
    ids=["questions alone", "two ends", "ends in words", "falls over an answer"],
)
def test_templates_whose_turns_end_otherwise_are_let_through_without_a_word(
    template: str, eos: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_model(tmp_path / "actor")
    tokenizer = make_tokenizer(chat_template=template)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(eos)
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        stored = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(stored | {"eos_token_id": eos}))
    preflight.run(config_of(tmp_path, "--data.apply_chat_template", "--algo.advantage.estimator", "rloo"))
    assert "ends a turn" not in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[]", "null", '{"early_stopping": "x"}'])
def test_a_generation_config_that_is_none_is_refused_by_name(content: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "actor")
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config.json of \S+/actor cannot be used: .*delete it"):
        preflight.run(config_of(tmp_path, "--data.apply_chat_template", "--algo.advantage.estimator", "rloo"))


def test_missing_statistics_of_a_reward_model_are_told_once_by_the_run_and_by_the_plan_of_a_dry_run(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preflight.run(config_of(models, *JUDGE, "--reward.normalize_enable"))
    assert capsys.readouterr().err.count("stores no mean and std") == 1
    preflight.run(config_of(models, *JUDGE, "--reward.normalize_enable", "--dry_run"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--reward.model_name_or_path", "@actor"), r"--reward.model_name_or_path: \S+/actor has no scalar head"),
        (("--critic.model_name_or_path", "@actor"), r"--critic.model_name_or_path: \S+/actor has no scalar head"),
        ((*JUDGE, "--ds.value_head_prefix", "nothing", "--critic.model_name_or_path", "@few"), r"/few has no scalar"),
        (("--reward.model_name_or_path", "@wide_head"), r"holds score.weight of shape \[2, 64\]"),
        (("--reward.model_name_or_path", "@short"), r"--data.max_len 96 is longer than the 64 tokens that \S+/short"),
        (("--critic.model_name_or_path", "@short"), r"--data.max_len 96 is longer than the 64 tokens that \S+/short"),
        (("--reward.model_name_or_path", "@foreign"), r"the critic \(--reward.model_name_or_path \S+/foreign\) reads"),
        (("--critic.model_name_or_path", "@foreign"), r"calls token \d+ .* where the policy calls it"),
        (("--reward.model_name_or_path", "@smaller"),
         r"the critic \(--reward.model_name_or_path \S+/smaller\) reads .* has only 300 embeddings where the policy's "
         r"rows hold token 511: give --critic.model_name_or_path a model with the policy's vocabulary"),
        (("--actor.model_name_or_path", "@few"), r"--actor.model_name_or_path \S+/few: .* token 511 .* only 300 embed"),
        ((*JUDGE, "--reward.model_name_or_path", "@broken"), r"no model can be loaded from \S+/broken: Safetensor"),
    ],
)  # fmt: skip
def test_models_that_do_not_fit_are_refused_by_flag_and_folder(models: Path, flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        preflight.run(config_of(models, *flags))
    assert re.search(said, str(caught.value)), caught.value


def test_a_reward_model_of_a_vocabulary_of_its_own_is_measured_by_its_own_tokenizer(
    models: Path, tmp_path: Path
) -> None:
    small = with_head(tmp_path / "small")
    make_tokenizer(300).save_pretrained(small)
    entries = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**entries, "vocab_size": 299}))
    flags = ("--algo.advantage.estimator", "rloo", "--reward.model_name_or_path", str(small))
    with pytest.raises(ConfigError, match="small: its rows hold token 299 .* only 299 embeddings"):
        preflight.run(config_of(models, *flags))
    (small / "config.json").write_text(json.dumps({**entries, "vocab_size": 300}))
    preflight.run(config_of(models, *flags))


def test_tokens_that_were_added_count_where_the_template_or_the_padding_writes_them(tmp_path: Path) -> None:
    make_tokenizer(400).save_pretrained(tmp_path / "plain")
    tokenizer = load_tokenizer(tmp_path / "plain")
    assert max(text_tokens(tokenizer)) == 399
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    # No text spells it out, so that a model need not have it.
    assert max(policy_tokens(tokenizer, apply_chat_template=True)) == 399
    tokenizer.add_tokens(["<turn>"], special_tokens=True)
    tokenizer.chat_template = "{% for m in messages %}<turn>{{ m['content'] }}{% endfor %}"
    assert max(policy_tokens(tokenizer, apply_chat_template=False)) == 399
    assert max(policy_tokens(tokenizer, apply_chat_template=True)) == 401
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert max(policy_tokens(tokenizer, apply_chat_template=False)) == 402
    assert END_ID in text_tokens(tokenizer)


def test_vocabularies_are_compared_apart_from_what_was_added() -> None:
    first, second, other = make_tokenizer(400), make_tokenizer(400), make_tokenizer(300)
    second.add_tokens(["[REWARD]"])
    assert other_token(first, second) is None and other_token(first, make_tokenizer(512)) is None
    assert other_token(other, first) is None  # a smaller vocabulary that the larger one begins with
    assert other_token(make_tokenizer(), renamed_tokenizer()) == RENAMED
