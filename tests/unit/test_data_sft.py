"""Rows of SFT: what is trained, how rows end, and what is cut."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from openrlhf.config.errors import ConfigError
from openrlhf.data.errors import DataError
from openrlhf.data.sft import SFTDataset, SFTFormat
from openrlhf.data.sources import load_dataset_mix
from tests.tiny_models import END_ID, make_tokenizer
from tests.unit.test_data_spans import HEADERS_ONLY, WORDS

RAW = SFTFormat(output_key="output", input_template="User: {}\nAssistant: ")
CHAT = SFTFormat(output_key="output", apply_chat_template=True)
HEAD = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def rows_of(tmp_path):
    def write(*rows):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_dataset_mix(str(file), None, split="train", max_samples=10**6, seed=0)

    return write


@pytest.fixture
def split(rows_of):
    """Returns: text that is not trained and text that is, of the one row given."""

    def run(row: dict, form: SFTFormat, *, max_len: int = 500, chat_template: str | None = None):
        tokenizer = make_tokenizer() if chat_template is None else make_tokenizer(chat_template=chat_template)
        record = SFTDataset(rows_of(row), tokenizer, form, max_len=max_len)[0]
        assert record.loss_mask.dtype == torch.bool and len(record.loss_mask) == len(record.tokens)
        assert not record.loss_mask[0]
        parts = [[], []]
        for token, trained in zip(record.tokens, record.loss_mask.tolist(), strict=True):
            parts[trained].append(token)
        return tuple(map(tokenizer.decode, parts))

    return run


def test_the_response_alone_is_trained_from_its_first_token_to_eos(split):
    assert split({"input": "q", "output": "the answer"}, RAW) == ("User: q\nAssistant: ", "the answer<|im_end|>")


def test_the_step_that_predicts_the_first_answer_token_is_trained(rows_of):
    """Two answer tokens behind three of the prompt; aligned to predicting steps the mask is 0 0 1 1."""
    tokenizer = make_tokenizer()
    form = SFTFormat(output_key="output")
    for prompt, expected in (("z%Q", [0, 0, 1, 1]), ("z", [1, 1])):
        record = SFTDataset(rows_of({"input": prompt, "output": "&"}), tokenizer, form, max_len=9)[0]
        assert record.loss_mask[1:].int().tolist() == expected


def test_an_eos_that_is_there_is_kept_and_no_token_is_overwritten(split, rows_of):
    for response in ("the answer<|im_end|>", "the answer<|im_end|>\n"):
        assert split({"input": "q", "output": response}, RAW)[1] == "the answer<|im_end|>"
        assert split({"input": "q", "output": response}, CHAT) == (HEAD, "the answer<|im_end|>")
    tokenizer = make_tokenizer()
    whole = SFTDataset(rows_of({"input": "q", "output": "one two three"}), tokenizer, RAW, max_len=500)[0]
    cut = SFTDataset(rows_of({"input": "q", "output": "one two three"}), tokenizer, RAW, max_len=len(whole.tokens) - 1)[
        0
    ]
    assert cut.tokens == whole.tokens[:-1] and END_ID not in cut.tokens


def test_a_prompt_is_tokenised_as_it_is_at_inference_even_where_a_token_reaches_over_its_end(rows_of):
    tokenizer = make_tokenizer()
    form = SFTFormat(output_key="output")
    assert len(tokenizer.encode("hello")) < len(tokenizer.encode("hel")) + len(tokenizer.encode("lo"))
    record = SFTDataset(rows_of({"input": "hel", "output": "lo"}), tokenizer, form, max_len=50)[0]
    prompt = tokenizer.encode("hel")
    assert record.tokens == [*prompt, *tokenizer.encode("lo"), END_ID]
    assert record.loss_mask.int().tolist() == [0] * len(prompt) + [1] * (len(record.tokens) - len(prompt))


@pytest.mark.parametrize(
    ("value", "response"),
    [
        ("q", "a"),
        ([{"role": "user", "content": "q"}], "a"),
        ([{"role": "user", "content": "q"}], [{"role": "assistant", "content": "a"}]),
        ("q", {"role": "assistant", "content": "a"}),
        (HEAD, "a"),
        (HEAD, "a<|im_end|>\n"),
    ],
)
def test_prompt_and_response_may_be_text_or_messages_or_templated_before(split, value, response):
    assert split({"input": value, "output": response}, CHAT) == (HEAD, "a<|im_end|>")


def test_a_conversation_in_one_column_trains_its_last_turn_or_with_multiturn_all(split):
    talk = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "b"},
    ]
    single = SFTFormat(apply_chat_template=True)
    multi = SFTFormat(apply_chat_template=True, multiturn=True)
    assert split({"input": talk}, single)[1] == "b<|im_end|>"
    assert split({"input": talk}, multi)[1] == "a<|im_end|>b<|im_end|>"
    assert split({"input": talk[:3]}, multi) == (HEAD, "a<|im_end|>")
    two_columns = SFTFormat(output_key="output", apply_chat_template=True, multiturn=True)
    assert split({"input": talk[:3], "output": "b"}, two_columns)[1] == "a<|im_end|>b<|im_end|>"


def test_a_template_that_ends_no_turn_gets_an_eos_and_one_that_uses_words_does_not(split):
    row = {"input": "q", "output": "a"}
    assert split(row, CHAT, chat_template=HEADERS_ONLY)[1] == "a<|im_end|>"
    assert split(row, CHAT, chat_template=WORDS)[1] == "a\n###"


def test_blanks_after_the_last_trained_token_are_left_out_and_inner_untrained_tokens_stay(rows_of):
    tokenizer = make_tokenizer()
    talk = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant", "user")]
    data = SFTDataset(
        rows_of({"input": talk}), tokenizer, SFTFormat(apply_chat_template=True, multiturn=True), max_len=500
    )
    record = data[0]
    assert record.loss_mask[-1] and record.tokens[-1] == END_ID
    assert tokenizer.decode(record.tokens) + "\n" == tokenizer.apply_chat_template(talk[:4], tokenize=False)


def test_pretraining_trains_every_token_but_the_first_of_the_text_as_it_stands(rows_of):
    form = SFTFormat(input_template="User: {}\nAssistant: ", pretrain_mode=True)
    tokenizer = make_tokenizer()
    record = SFTDataset(rows_of({"input": "hello world"}), tokenizer, form, max_len=50)[0]
    assert record.tokens == [*tokenizer.encode("hello world"), END_ID]
    assert record.loss_mask.tolist() == [False] + [True] * (len(record.tokens) - 1)


def test_pretraining_takes_whole_conversations_too(rows_of):
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    form = SFTFormat(apply_chat_template=True, pretrain_mode=True)
    tokenizer = make_tokenizer()
    record = SFTDataset(rows_of({"input": talk}), tokenizer, form, max_len=50)[0]
    assert tokenizer.decode(record.tokens) == HEAD + "a<|im_end|>\n"
    assert record.loss_mask[1:].all()


def test_rows_are_cut_at_max_len_and_left_out_where_nothing_trained_remains_and_both_are_counted(rows_of):
    tokenizer = make_tokenizer()
    rows = [
        {"input": "q", "output": "one two"},
        {"input": "q", "output": "x " * 50},
        {"input": "q " * 50, "output": "a"},
    ]
    data = SFTDataset(rows_of(*rows), tokenizer, RAW, max_len=20)
    assert (len(data), data.truncated, data.dropped) == (2, 2, 1)
    assert max(data.lengths) == 20
    line = data.summary()
    assert "2 rows were cut at --data.max_len 20" in line and "1 of them left out" in line
    assert str(sum(int(record.loss_mask.sum()) for record in data)) in line
    with pytest.raises(DataError, match="none of the 1 rows.*max_len 20"):
        SFTDataset(rows_of(rows[2]), tokenizer, RAW, max_len=20)


def test_bos_stands_once_before_a_row_whether_the_template_writes_it_or_the_tokenizer(rows_of):
    # RB22
    turns = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}<|im_end|>{% endfor %}"
    writing = make_tokenizer(chat_template="<|im_start|>" + turns)
    adding = make_tokenizer(chat_template=turns)
    adding.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    talk = {"input": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    whole = SFTFormat(apply_chat_template=True)
    for tokenizer, row, form, count in (
        (writing, talk, whole, 1),
        (writing, {"input": "q", "output": "a"}, CHAT, 1),
        (adding, {"input": "q", "output": "a"}, RAW, 1),
        (adding, {"input": "q", "output": "a"}, CHAT, 0),
    ):
        tokenizer.bos_token = "<|im_start|>"
        ids = SFTDataset(rows_of(row), tokenizer, form, max_len=50)[0].tokens
        assert ids.count(tokenizer.bos_token_id) == count
        assert (ids[0] == tokenizer.bos_token_id) == bool(count)


def test_the_same_rows_make_the_same_records(rows_of):
    rows = rows_of(*({"input": f"q{n}", "output": f"a{n}"} for n in range(5)))
    first, second = (list(SFTDataset(rows, make_tokenizer(), RAW, max_len=50)) for _ in range(2))
    assert [record.tokens for record in first] == [record.tokens for record in second]


@pytest.mark.parametrize(
    ("bad", "form", "message"),
    [
        ({"input": "q"}, RAW, "no column 'output', which --data.output_key names (columns: input)"),
        ({"question": "q", "output": "a"}, RAW, "no column 'input'"),
        ({"input": "q", "output": None}, RAW, "column 'output': expected a response, found null"),
        ({"input": "q", "output": 5}, RAW, "column 'output': expected text, found int"),
        ({"input": " ", "output": "a"}, RAW, "the prompt is empty"),
        ({"input": 5, "output": "a"}, RAW, "expected text, found a number"),
        ({"input": "q", "output": 5}, CHAT, "expected text or a list of messages, found a number"),
        ({"input": "q"}, SFTFormat(apply_chat_template=True), "the last message is not the assistant's"),
        ({"input": "q"}, SFTFormat(apply_chat_template=True, multiturn=True), "no assistant message"),
        ({"input": ""}, SFTFormat(pretrain_mode=True), "the text is empty"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_columns(bad, form, message, rows_of):
    fine = {"input": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "output": "a"}
    if not form.apply_chat_template:
        fine["input"] = "q"
    with pytest.raises(DataError) as caught:
        SFTDataset(rows_of(fine, bad), make_tokenizer(), form, max_len=50)
    assert "rows.jsonl, row 2: " in str(caught.value) and message in str(caught.value)
    assert f"(columns: {', '.join(bad)})" in str(caught.value)


@pytest.mark.parametrize(
    ("form", "fine", "said"),
    [
        (SFTFormat(pretrain_mode=True), {"input": "one two"}, "no token of the text"),
        (SFTFormat(output_key="output"), {"input": "one", "output": "two"}, "no token of the prompt 'xyz'"),
        (SFTFormat(pretrain_mode=True, apply_chat_template=True), {"input": "one"}, "no token of the text"),
    ],
)
def test_a_row_that_the_tokenizer_drops_whole_is_named(form, fine, said, rows_of):
    # No unknown token and no bytes: characters that are not in the vocabulary vanish.
    letters = Tokenizer(models.BPE({letter: i for i, letter in enumerate("onetw ")}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<end>")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    assert len(SFTDataset(rows_of(fine, fine), tokenizer, form, max_len=50)) == 2
    with pytest.raises(DataError, match=f"rows.jsonl, row 2: .*{said}"):
        SFTDataset(rows_of(fine, {**fine, "input": "xyz"}), tokenizer, form, max_len=50)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"multiturn": True}, "--data.apply_chat_template"),
        ({}, "--data.output_key"),
        ({"output_key": "output", "input_template": "none"}, "--data.input_template"),
    ],
)
def test_settings_that_mean_nothing_are_refused_with_the_flag_to_give(settings, flag):
    with pytest.raises(ConfigError, match=flag):
        SFTFormat(**settings)
