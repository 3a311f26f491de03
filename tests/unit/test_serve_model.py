"""How the reward server reads texts, and which models it refuses."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from openrlhf.config import ConfigError
from openrlhf.data.templates import render_messages, render_prompt
from openrlhf.serve.metrics import ServerMetrics
from openrlhf.serve.model import TextError, encode_query
from openrlhf.serve.worker import ScoringWorker
from tests.serve_room import load, make_reward_model
from tests.tiny_models import make_tiny_model, make_tokenizer
from tests.unit.test_data_templates import word_tokenizer

TURNS = (
    "{{ bos_token }}{% for m in messages %}<turn> {{ m['role'] }} {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<turn> assistant {% endif %}"
)


@pytest.fixture
def turns() -> PreTrainedTokenizerFast:
    """Adds BOS by itself, and so does its chat template, whose turns have special tokens: 13 and 14."""
    tokenizer = word_tokenizer(chat_template=TURNS)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>", "<end>"]})
    return tokenizer


def test_a_templated_text_with_its_response_has_one_bos_and_nothing_else_is_added(turns) -> None:
    turn, end = turns.convert_tokens_to_ids(["<turn>", "<end>"])
    rendered = render_prompt(turns, "hi", apply_chat_template=True)
    prompt = [1, turn, 10, 11, end, turn, 12]
    assert encode_query(turns, rendered.text + "hi <end>") == [*prompt, 11, end]
    assert encode_query(turns, rendered.text + "hi") == [*prompt, 11]
    # What a tokenizer decoded without its BOS.
    assert encode_query(turns, rendered.text.removeprefix("<bos>") + "hi") == [*prompt, 11]


def test_a_templated_text_that_lost_its_beginning_stays_as_it_was_cut(turns) -> None:
    turn, end = turns.convert_tokens_to_ids(["<turn>", "<end>"])
    assert encode_query(turns, "hi <end> <turn> assistant hi <end>") == [11, end, turn, 12, 11, end]


@pytest.mark.parametrize("add_eos", [False, True])
def test_plain_text_has_the_bos_of_its_training_once_and_an_eos_only_where_it_is_written(add_eos, turns) -> None:
    plain = word_tokenizer(add_eos=add_eos)
    assert encode_query(plain, "hi") == encode_query(plain, "<bos> hi") == [1, 11]
    assert encode_query(plain, "hi <eos>") == [1, 11, 2]
    assert encode_query(turns, "hi") == [1, 11]


def test_tokens_that_are_as_the_tokenizer_cuts_text_come_back_as_they_were() -> None:
    tokenizer = make_tokenizer()
    messages = [{"role": "user", "content": "what is 1 + 2 ?"}]
    ids = tokenizer(render_messages(tokenizer, messages, add_generation_prompt=True), add_special_tokens=False)
    ids = [*ids["input_ids"], *tokenizer.encode("the answer is 3 ."), tokenizer.eos_token_id]
    assert encode_query(tokenizer, tokenizer.decode(ids, clean_up_tokenization_spaces=False)) == ids
    assert encode_query(tokenizer, tokenizer.decode(ids[3:], clean_up_tokenization_spaces=False)) == ids[3:]


def test_special_tokens_stay_where_they_are_however_many_there_are() -> None:
    tokenizer = make_tokenizer()
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    word = tokenizer.encode("word")
    text = "<pad>" * 2000 + "word<|im_end|>" * 20_000 + "<|im_end|>" * 2000 + "word"
    assert encode_query(tokenizer, text) == [pad] * 2000 + [*word, end] * 20_000 + [end] * 2000 + word


def test_a_model_without_a_head_or_too_short_for_the_texts_is_refused_by_its_flag(tmp_path) -> None:
    policy = make_tiny_model(tmp_path / "policy")
    with pytest.raises(ConfigError, match="has no scalar head.*--ds.value_head_prefix"):
        load(policy)
    with pytest.raises(ConfigError, match="--data.max_len 4096 is longer than the 2048 tokens"):
        load(policy, max_len=4096)


def test_a_head_of_another_name_is_found_by_its_flag(tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_reward_model(tmp_path / "rm")
    row = load(folder).encode("hello world")
    expected = load(folder).score([row])
    weights = load_file(folder / "model.safetensors")
    weights["judge.weight"] = weights.pop("score.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert load(folder, ds={"value_head_prefix": "judge"}).score([row]) == expected
    with pytest.raises(ConfigError, match="has no scalar head"):
        load(folder)


def test_a_token_without_an_embedding_is_named(tmp_path) -> None:
    folder = make_reward_model(tmp_path / "rm", vocab=512)
    model = load(folder)
    model.tokenizer.add_tokens([f"beyond{number}" for number in range(9)])
    with pytest.raises(TextError, match=r"holds token 5\d\d, and the model has embeddings for 512"):
        model.encode("beyond8")


def test_a_real_forward_that_runs_out_of_memory_leaves_none_of_its_tensors_to_the_next_one(tmp_path) -> None:
    model = load(make_reward_model(tmp_path / "rm"))
    rows = [model.encode(text) for text in ("hello world", "one two three")]
    expected = [model.score([row])[0] for row in rows]
    alive: list[int] = []
    held: list[weakref.ref[torch.Tensor]] = []

    def before(*_: Any) -> None:
        alive.append(sum(tensor() is not None for tensor in held))

    def after(_: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        held.extend(map(weakref.ref, (*inputs, output)))
        if len(held) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.model.register_forward_pre_hook(before)
    last = [module for module in model.model.modules() if isinstance(module, torch.nn.Linear)][-2]
    last.register_forward_hook(after)
    worker = ScoringWorker(lambda: model, ServerMetrics(), max_tokens=100)
    futures = [worker.submit([row]) for row in rows]
    gc.disable()
    try:
        worker.start()
        assert [future.result(60)[0] for future in futures] == pytest.approx(expected, abs=1e-5)
    finally:
        gc.enable()
        worker.stop(60)
    # Both requests together, one token, and each request alone.
    assert not any(alive) and len(alive) == 4 and len(held) == 8
