"""Preference pairs: what is prompt and what response, how rows end, what is cut and what is refused."""

from __future__ import annotations

import json

import pytest
import torch

from openrlhf.config.errors import ConfigError
from openrlhf.data.errors import DataError
from openrlhf.data.pair_packing import pack_pairs
from openrlhf.data.preference import PreferenceDataset, PreferenceFormat
from openrlhf.data.sources import load_dataset_mix
from tests.tiny_models import END_ID, PAD_ID, make_tokenizer
from tests.unit.test_data_spans import HEADERS_ONLY

PLAIN = PreferenceFormat(prompt_key="prompt")
WHOLE = PreferenceFormat()
CHAT = PreferenceFormat(apply_chat_template=True)
CHAT_PROMPT = PreferenceFormat(prompt_key="prompt", apply_chat_template=True)
HEAD = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def rows_of(tmp_path):
    def write(*rows, name="pairs.jsonl"):
        file = tmp_path / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_dataset_mix(str(file), None, split="train", max_samples=10**6, seed=0)

    return write


@pytest.fixture
def split(rows_of):
    """Returns: text before the response and text of it, of the chosen and of the rejected row of the one pair given."""

    def run(row: dict, form: PreferenceFormat, *, chat_template: str | None = None):
        tokenizer = make_tokenizer() if chat_template is None else make_tokenizer(chat_template=chat_template)
        record = PreferenceDataset(rows_of(row), tokenizer, form, max_len=500)[0]
        texts = []
        for ids, mask in ((record.chosen, record.chosen_mask), (record.rejected, record.rejected_mask)):
            assert mask.dtype == torch.bool and len(mask) == len(ids) and not mask[0]
            parts = [[], []]
            for token, scored in zip(ids, mask.tolist(), strict=True):
                parts[scored].append(token)
            texts.append(tuple(map(tokenizer.decode, parts)))
        return tuple(texts)

    return run


def test_a_prompt_in_a_column_of_its_own_stands_before_both_responses_which_end_with_eos(split):
    row = {"prompt": "what is 1 + 2 ?", "chosen": " 3", "rejected": " 5 ."}
    form = PreferenceFormat(prompt_key="prompt", input_template="Q: {} A:")
    prompt = "Q: what is 1 + 2 ? A:"
    assert split(row, form) == ((prompt, " 3<|im_end|>"), (prompt, " 5 .<|im_end|>"))


def test_an_eos_that_is_there_is_kept_once(split):
    row = {"prompt": "q", "chosen": "three<|im_end|>\n", "rejected": "four"}
    assert split(row, PLAIN) == (("q", "three<|im_end|>"), ("q", "four<|im_end|>"))
    assert split(row, CHAT_PROMPT) == ((HEAD, "three<|im_end|>"), (HEAD, "four<|im_end|>"))
    row = {"chosen": "q three<|im_end|>\n", "rejected": "q four"}
    assert split(row, WHOLE) == (("q", " three<|im_end|>"), ("q", " four<|im_end|>"))


def test_without_a_prompt_column_the_tokens_that_both_texts_begin_with_are_the_prompt(split, rows_of):
    row = {"chosen": "what is 1 ? the answer", "rejected": "what is 1 ? the thing"}
    assert split(row, WHOLE)[0] == ("what is 1 ? the", " answer<|im_end|>")
    # "hello" begins with letters of "help" and not with its tokens.
    tokenizer = make_tokenizer()
    record = PreferenceDataset(rows_of({"chosen": "say hello", "rejected": "say help"}), tokenizer, WHOLE, max_len=50)[
        0
    ]
    prompts = [int((~mask).sum()) for mask in (record.chosen_mask, record.rejected_mask)]
    assert record.chosen[: prompts[0]] == record.rejected[: prompts[1]]
    assert record.chosen[prompts[0]] != record.rejected[prompts[1]]
    assert tokenizer.decode(record.chosen[: prompts[0]]) != "say hel"


def test_the_first_token_of_a_row_is_no_target_even_where_texts_share_nothing(split):
    # Before it nothing stands that could predict it.
    (before, chosen), (other_before, rejected) = split({"chosen": "x y", "rejected": "1 2"}, WHOLE)
    assert (before, other_before) == ("x", "1") and (chosen, rejected) == (" y<|im_end|>", " 2<|im_end|>")


def test_a_text_that_begins_the_other_one_keeps_its_last_token_as_response(rows_of):
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    data = PreferenceDataset(rows_of({"chosen": "one two", "rejected": "one two three"}), tokenizer, WHOLE, max_len=50)
    record = data[0]
    assert record.chosen_mask.int().tolist()[-2:] == [0, 1]
    assert record.rejected_mask.sum() == len(record.rejected) - len(record.chosen) + 1


@pytest.mark.parametrize(
    ("prompt", "chosen"),
    [
        ("q", "a"),
        ([user("q")], "a"),
        ([user("q")], [assistant("a")]),
        ("q", assistant("a")),
        ("q", [user("q"), assistant("a")]),
        ([user("q")], [user("q"), assistant("a")]),
        (HEAD, "a"),
        (HEAD, "a<|im_end|>\n"),
    ],
)
def test_prompt_and_responses_may_be_text_or_messages_and_messages_may_repeat_the_prompt(split, prompt, chosen):
    row = {"prompt": prompt, "chosen": chosen, "rejected": "b"}
    assert split(row, CHAT_PROMPT) == ((HEAD, "a<|im_end|>"), (HEAD, "b<|im_end|>"))


def test_conversations_share_messages_and_what_the_assistant_wrote_after_them_is_the_response(split):
    talk = [user("q"), assistant("a"), user("r")]
    head = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\nr<|im_end|>\n"
    row = {
        "chosen": [*talk, assistant("the one")],
        "rejected": [*talk, assistant("the two"), user("s"), assistant("c")],
    }
    (before, response), (other_before, other) = split(row, CHAT)
    # The shared first word belongs to the responses: it was written by the assistant.
    assert before == head + "<|im_start|>assistant\n" and response == "the one<|im_end|>"
    assert other == "the two<|im_end|>c<|im_end|>"
    assert other_before == before + "\n<|im_start|>user\ns<|im_end|>\n<|im_start|>assistant\n"


def test_conversations_of_which_one_goes_on_where_the_other_ends_both_have_a_response(split):
    row = {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("a"), user("r"), assistant("b")]}
    (_, response), (_, other) = split(row, CHAT)
    assert (response, other) == ("a<|im_end|>", "a<|im_end|>b<|im_end|>")


def test_texts_that_a_chat_template_has_rendered_are_taken_as_they_stand(split):
    row = {"chosen": HEAD + "three", "rejected": HEAD + "four<|im_end|>\n"}
    assert split(row, CHAT) == ((HEAD, "three<|im_end|>"), (HEAD, "four<|im_end|>"))


def test_a_template_that_ends_no_turn_gets_an_eos(split):
    row = {"prompt": "q", "chosen": "a", "rejected": "b"}
    (_, chosen), (_, rejected) = split(row, CHAT_PROMPT, chat_template=HEADERS_ONLY)
    assert (chosen, rejected) == ("a<|im_end|>", "b<|im_end|>")


def test_bos_stands_once_before_each_row_whether_the_template_writes_it_or_the_tokenizer(rows_of):
    # RB22
    turns = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}<|im_end|>{% endfor %}"
    tokenizer = make_tokenizer(chat_template="<|im_start|>" + turns)
    tokenizer.bos_token = "<|im_start|>"
    row = {"prompt": "q", "chosen": "a", "rejected": "b"}
    record = PreferenceDataset(rows_of(row), tokenizer, CHAT_PROMPT, max_len=50)[0]
    for ids in (record.chosen, record.rejected):
        assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id


def test_long_rows_are_cut_and_pairs_that_teach_nothing_are_left_out_and_all_are_counted(rows_of):
    tokenizer = make_tokenizer()
    rows = [
        {"prompt": "q", "chosen": "one", "rejected": "two"},
        {"prompt": "q", "chosen": "x " * 50, "rejected": "two"},
        {"prompt": "q " * 50, "chosen": "one", "rejected": "two"},
        {"prompt": "q", "chosen": "one", "rejected": "one"},
        {"prompt": "q", "chosen": "x " * 50 + "a", "rejected": "x " * 50 + "b"},
    ]
    data = PreferenceDataset(rows_of(*rows), tokenizer, PLAIN, max_len=20)
    assert (len(data), data.truncated, data.dropped, data.equal) == (2, 3, 1, 2)
    cut = data[1].chosen
    whole = PreferenceDataset(rows_of(rows[1]), tokenizer, PLAIN, max_len=500)[0].chosen
    assert cut == whole[:20] and END_ID not in cut
    assert [data[i].row for i in range(2)] == [1, 2] and data[0].source.endswith("pairs.jsonl")
    line = data.summary()
    assert "2 pairs" in line and "3 pairs were cut at --data.max_len 20" in line
    assert "1 left out because nothing of a response remained" in line and "2 left out because chosen and" in line
    with pytest.raises(DataError, match="none of the 1 pairs can be used.*max_len 20"):
        PreferenceDataset(rows_of(rows[2]), tokenizer, PLAIN, max_len=20)
    with pytest.raises(ConfigError, match="--data.max_len 1 "):
        PreferenceDataset(rows_of(rows[0]), tokenizer, PLAIN, max_len=1)


def test_margins_are_read_where_they_are_asked_for_from_numbers_and_from_cells(rows_of, tmp_path):
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "margin": 0.5}
    form = PreferenceFormat(prompt_key="prompt", margin=True)
    tokenizer = make_tokenizer()
    assert PreferenceDataset(rows_of(row), tokenizer, form, max_len=50)[0].margin == 0.5
    assert PreferenceDataset(rows_of(row), tokenizer, PLAIN, max_len=50)[0].margin == 0.0
    (tmp_path / "pairs.csv").write_text("prompt,chosen,rejected,margin\nq,a,b,-1.5\n")
    rows = load_dataset_mix(str(tmp_path / "pairs.csv"), None, split="train", max_samples=9, seed=0)
    assert PreferenceDataset(rows, tokenizer, form, max_len=50)[0].margin == -1.5


MARGIN = PreferenceFormat(prompt_key="prompt", margin=True)
SYSTEM = {"role": "system", "content": "s"}
PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("bad", "form", "message"),
    [
        ({"chosen": "a", "rejected": "b"}, PLAIN, "no column 'prompt', which --data.prompt_key names"),
        ({"prompt": "q", "chosen": "a"}, PLAIN, "no column 'rejected', which --data.rejected_key names"),
        ({**PAIR, "chosen": None}, PLAIN, "column 'chosen': expected a response, found null"),
        ({**PAIR, "rejected": 5}, PLAIN, "column 'rejected': expected text, found int"),
        ({**PAIR, "prompt": " "}, PLAIN, "the prompt is empty"),
        ({**PAIR, "chosen": [assistant("a")]}, PLAIN, "--data.apply_chat_template would render"),
        ({"chosen": "a", "rejected": " "}, WHOLE, "column 'rejected': the text is empty"),
        ({"chosen": [user("q")], "rejected": "b"}, WHOLE, "--data.apply_chat_template would render"),
        ({"chosen": [user("q"), assistant("a")], "rejected": "b"}, CHAT, "'rejected' is text where the other response"),
        ({"chosen": "a", "rejected": "b"}, CHAT, "'chosen' is text that the chat template has not rendered"),
        ({"chosen": [user("q"), assistant("a")], "rejected": [user("q")]}, CHAT, "'rejected': the last message is not"),
        ({**PAIR, "chosen": [user("q")]}, CHAT_PROMPT, "column 'chosen': the last message is not the assistant's"),
        ({**PAIR, "chosen": [user("r"), assistant("a")]}, CHAT_PROMPT, "'chosen' begins with a message of the user's"),
        (
            {**PAIR, "rejected": [{"role": "system", "content": "s"}, user("q"), assistant("a")]},
            CHAT_PROMPT,
            "system's",
        ),
        ({**PAIR, "chosen": []}, CHAT_PROMPT, "column 'chosen': the list of messages is empty"),
        ({**PAIR, "chosen": [{"role": "assistant"}]}, CHAT_PROMPT, "column 'chosen': message 1 has no content"),
        (PAIR, MARGIN, "no column 'margin', which --model.margin_loss_enable names"),
        ({**PAIR, "margin": None}, MARGIN, "column 'margin': expected a number"),
        ({**PAIR, "margin": "much"}, MARGIN, "found 'much'"),
        ({**PAIR, "margin": True}, MARGIN, "found True"),
        ({**PAIR, "margin": "inf"}, MARGIN, "found 'inf'"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_columns(bad, form, message, rows_of):
    chat = form.apply_chat_template
    fine = {"prompt": "q", "chosen": "q a", "rejected": "q b", "margin": 1}
    if chat and form.prompt_key is None:
        fine |= {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]}
    with pytest.raises(DataError) as caught:
        PreferenceDataset(rows_of(fine, bad), make_tokenizer(), form, max_len=50)
    assert "pairs.jsonl, row 2: " in str(caught.value) and message in str(caught.value)
    assert f"(columns: {', '.join(bad)})" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"chosen_key": "x", "rejected_key": "x"}, "--data.chosen_key and --data.rejected_key"),
        ({"prompt_key": "chosen"}, "--data.prompt_key and --data.chosen_key"),
        ({"input_template": "none"}, "--data.input_template"),
    ],
)
def test_settings_that_mean_nothing_are_refused_with_their_flags(settings, flags):
    with pytest.raises(ConfigError, match=flags):
        PreferenceFormat(**settings)


def test_a_tokenizer_without_chat_template_is_refused(rows_of):
    with pytest.raises(ConfigError, match="--data.tokenizer_chat_template"):
        PreferenceDataset(rows_of(PAIR), make_tokenizer(chat_template=None), CHAT_PROMPT, max_len=50)


def test_pairs_are_packed_side_by_side_with_their_number_and_margin_in_both_rows(rows_of):
    # RB19, RB31: every mask stands at its own row's place, and both halves have theirs.
    rows = [{"prompt": "q " * n, "chosen": "a " * n, "rejected": "b", "margin": n / 2} for n in (1, 2, 3)]
    data = PreferenceDataset(rows_of(*rows), make_tokenizer(), MARGIN, max_len=50)
    batch = pack_pairs(data, [2, 0], PAD_ID)
    wanted = [row for pair in (data[2], data[0]) for row in (pair.chosen, pair.rejected)]
    assert batch.tokens.tolist() == [token for row in wanted for token in row]
    assert batch.lengths.tolist() == [len(row) for row in wanted]
    masks = [mask for pair in (data[2], data[0]) for mask in (pair.chosen_mask, pair.rejected_mask)]
    assert torch.equal(batch.action_mask, torch.cat(masks)) and all(mask.any() for mask in masks)
    assert batch.row_fields["pair"].tolist() == [2, 2, 0, 0]
    assert batch.row_fields["margin"].tolist() == [1.5, 1.5, 0.5, 0.5]
    assert [int(data.lengths[i]) for i in (2, 0)] == [batch.lengths[:2].sum(), batch.lengths[2:].sum()]
    assert data.largest_token == max(token for i in range(3) for token in (*data[i].chosen, *data[i].rejected))


def test_no_pairs_make_an_empty_batch_with_the_same_fields(rows_of):
    data = PreferenceDataset(rows_of(PAIR), make_tokenizer(), PLAIN, max_len=50)
    batch = pack_pairs(data, [], PAD_ID)
    assert batch.pad_rows == batch.num_rows == 1 and not batch.action_mask.any()
    assert batch.row_fields.keys() == pack_pairs(data, [0], PAD_ID).row_fields.keys()
    with pytest.raises(IndexError, match="pair 1 of 1"):
        data[1]
