"""Prompts become text and text becomes tokens in one way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from openrlhf.config.errors import ConfigError
from openrlhf.data.errors import DataError
from openrlhf.data.prompts import PromptDataset, PromptRecord
from openrlhf.data.sft import SFTFormat
from openrlhf.data.sources import load_dataset_mix
from openrlhf.data.templates import already_templated, encode, render_prompt
from tests.tiny_models import make_tokenizer

BOS_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}assistant"
LLAMA2_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }} {{ eos_token }}{% endif %}{% endfor %}"
)
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] | title }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)


def word_tokenizer(*, chat_template: str | None = None, add_eos: bool = False) -> PreTrainedTokenizerFast:
    """Words for tokens; adds BOS by itself (and EOS with ``add_eos``), as Llama's tokenizers do."""
    vocab = {"<unk>": 0, "<bos>": 1, "<eos>": 2, "user": 10, "hi": 11, "assistant": 12}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>" if add_eos else "<bos> $A", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    wrapped.chat_template = chat_template
    return wrapped


def chat(tokenizer, prompt):
    return render_prompt(tokenizer, prompt, apply_chat_template=True)


def test_a_template_that_writes_bos_and_a_tokenizer_that_adds_it_make_one():
    tokenizer = word_tokenizer(chat_template=BOS_TEMPLATE)
    rendered = chat(tokenizer, "hi")
    assert rendered.text == "<bos>user hi assistant"
    ids = encode(tokenizer, rendered.text, templated=rendered.templated)
    assert ids == [1, 10, 11, 12]
    assert encode(tokenizer, rendered.text, templated=False) == ids


def test_raw_text_gets_the_bos_that_the_tokenizer_adds_and_never_an_eos():
    assert encode(word_tokenizer(), "hi", templated=False) == [1, 11]
    assert encode(word_tokenizer(), "<bos>hi", templated=False) == [1, 11]
    assert encode(word_tokenizer(add_eos=True), "hi", templated=False) == [1, 11]
    assert encode(word_tokenizer(add_eos=True), "hi<eos>", templated=False)[:3] == [1, 11, 2]
    assert encode(make_tokenizer(), "hi", templated=False) == make_tokenizer().encode("hi")


@pytest.mark.parametrize("template", [None, LLAMA2_TEMPLATE, PLAIN_TEMPLATE])
def test_text_that_was_templated_is_not_templated_again(template):
    tokenizer = make_tokenizer()
    if template is not None:
        tokenizer = word_tokenizer(chat_template=template)
    once = chat(tokenizer, "what is 1 + 2 ?")
    twice = chat(tokenizer, once.text)
    assert twice == once
    with_system = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what?"}]
    if template != LLAMA2_TEMPLATE:
        rendered = chat(tokenizer, with_system)
        assert "be brief" in rendered.text
        if template is None:
            assert chat(tokenizer, rendered.text) == rendered


def test_text_that_lost_its_bos_after_templating_gets_it_back():
    tokenizer = word_tokenizer(chat_template=LLAMA2_TEMPLATE)
    rendered = chat(tokenizer, "[INST] hi [/INST]")
    assert rendered.text == "[INST] hi [/INST]"
    assert encode(tokenizer, rendered.text, templated=rendered.templated)[:2] == [1, 0]


@pytest.mark.parametrize(
    "prompt",
    ["hello", "What does <|im_start|> mean?", "<|im_start|> is a token", "User: hi", "explain Assistant: in a chat"],
)
def test_text_that_only_speaks_of_a_template_is_templated(prompt):
    for tokenizer in (make_tokenizer(), word_tokenizer(chat_template=PLAIN_TEMPLATE)):
        assert already_templated(tokenizer, prompt) is None
        assert prompt in chat(tokenizer, prompt).text != prompt


def test_a_string_becomes_a_user_message_and_messages_stay_as_they_are():
    tokenizer = make_tokenizer()
    expected = "<|im_start|>user\nhi {x}<|im_end|>\n<|im_start|>assistant\n"
    assert chat(tokenizer, "hi {x}").text == expected
    assert chat(tokenizer, [{"role": "user", "content": "hi {x}"}]).text == expected
    assert chat(tokenizer, [{"role": "user", "content": "hi {x}", "tool_calls": None}]).text == expected


def test_messages_that_arrow_gives_as_a_dict_of_lists_are_messages():
    columns = {"role": ["system", "user"], "content": ["be brief", "hi"], "name": [None, None]}
    rows = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert chat(make_tokenizer(), columns) == chat(make_tokenizer(), rows)


def test_braces_in_a_prompt_are_harmless_and_line_breaks_are_real():
    rendered = render_prompt(
        make_tokenizer(), "a{b}{}", apply_chat_template=False, input_template="User: {}\nAssistant: "
    )
    assert (rendered.text, rendered.templated) == ("User: a{b}{}\nAssistant: ", False)


def test_an_unset_template_leaves_the_prompt_as_it_is():
    assert render_prompt(make_tokenizer(), "a\n", apply_chat_template=False).text == "a\n"


@pytest.mark.parametrize("template", ["User: hello", "{} and {}", ""])
def test_a_template_without_exactly_one_slot_is_refused(template, tmp_path):
    with pytest.raises(ConfigError, match=r"input_template.*slots.*exactly one"):
        PromptDataset(write(tmp_path, [{"input": "hi"}]), make_tokenizer(), input_template=template)
    with pytest.raises(ConfigError, match=r"input_template.*slots.*exactly one"):
        SFTFormat(output_key="output", input_template=template)


def test_a_tokenizer_without_chat_template_is_named_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match="apply_chat_template.*tokenizer_chat_template"):
        chat(make_tokenizer(chat_template=None), "hi")
    rows = write(tmp_path, [{"input": "hi"}])
    with pytest.raises(ConfigError, match="apply_chat_template"):
        PromptDataset(rows, make_tokenizer(chat_template=None), apply_chat_template=True)


def write(folder: Path, rows: list):
    file = folder / "rows.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return load_dataset_mix(str(file), None, split="train", max_samples=10**6, seed=0)


def test_labels_and_data_sources_reach_the_record_unchanged(tmp_path):
    rows = write(
        tmp_path,
        [
            {"q": "a", "gold": {"x": [1, None]}, "datasource": "math"},
            {"q": "b", "gold": None},
            {"q": "c", "gold": 7, "images": ["i.png"]},
        ],
    )
    data = PromptDataset(rows, make_tokenizer(), input_key="q", label_key="gold", image_key="images")
    assert list(data) == [
        PromptRecord("a", {"x": [1, None]}, "math", False),
        PromptRecord("b", None, "default", False),
        PromptRecord("c", 7, "default", False, ["i.png"]),
    ]
    assert PromptDataset(rows, make_tokenizer(), input_key="q")[0].label == ""
    assert len(data) == 3


@pytest.mark.parametrize(
    ("bad", "chat_template", "message"),
    [
        ({"question": "x"}, True, "no column 'input', which --data.input_key names (columns: question)"),
        ({"input": "x"}, True, "no column 'label', which --data.label_key names (columns: input)"),
        ({"input": " \n", "label": 1}, True, "is empty"),
        ({"input": " \n", "label": 1}, False, "the prompt is empty"),
        ({"input": "x", "label": 1, "datasource": "ma\nth"}, True, "column 'datasource': 'ma\\nth' holds '\\n'"),
        ({"input": "x", "label": 1, "datasource": "\x1b[31m"}, False, "holds '\\x1b', and metrics are named by it"),
        ({"input": None, "label": 1}, True, "expected text or a list of messages, found null"),
        ({"input": 3, "label": 1}, True, "expected text or a list of messages, found a number"),
        ({"input": 3, "label": 1}, False, "found a number"),
        ({"input": [], "label": 1}, True, "the list of messages is empty"),
        ({"input": [{"role": "user", "content": "x"}], "label": 1}, False, "--data.apply_chat_template"),
        ({"input": [{"from": "human", "value": "x"}], "label": 1}, True, "message 1 has no role (keys: from, value)"),
        ({"input": [{"role": "user"}], "label": 1}, True, "message 1 has no content"),
        ({"input": [{"role": "user", "content": 5}], "label": 1}, True, "content of message 1 is a number"),
        ({"input": [{"role": "user", "content": ""}], "label": 1}, True, "message 1, the user's, is empty"),
        ({"input": ["x"], "label": 1}, True, "message 1 is a str, not an object"),
        (
            {"input": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "label": 1},
            True,
            "nothing to answer",
        ),
        ('{"input": "x", "label": ', True, "the line is not JSON"),
    ],
)
def test_a_bad_row_stops_the_start_with_file_line_and_columns(bad, chat_template, message, tmp_path):
    rows = write(tmp_path, [{"input": "fine", "label": 0}, bad])
    with pytest.raises(DataError) as caught:
        PromptDataset(rows, make_tokenizer(), label_key="label", apply_chat_template=chat_template)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / 'rows.jsonl'}, row 2: ")
    assert message in text
    if isinstance(bad, dict):
        assert f"(columns: {', '.join(bad)})" in text


def test_what_a_template_complains_of_is_said_with_the_row(tmp_path):
    tokenizer = make_tokenizer(chat_template="{{ raise_exception('only two roles') }}")
    with pytest.raises(DataError, match="row 1: .*only two roles"):
        PromptDataset(write(tmp_path, [{"input": "x"}]), tokenizer, apply_chat_template=True)
