"""Which tokens of a conversation are the assistant's, under templates of every habit."""

from __future__ import annotations

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from openrlhf.data.packed_batch import pack_rows
from openrlhf.data.spans import encode_marked, mark_assistant, turn_end
from tests.tiny_models import CHAT_TEMPLATE, make_tokenizer

GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

# Earlier turns lose their reasoning, the last one is given an empty one where it has none; content is stripped.
THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set text = m.content.split('</think>')[-1].strip() %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else '' %}"
    "<|im_start|>assistant\n{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ text }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endif %}{% endfor %}" + GENERATION
)
# The generation prompt opens the reasoning, which no turn of the history has.
OPENED_THINKING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content.split('</think>')[-1] }}"
    "<|im_end|>{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
INST = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }} <|im_end|>{% endif %}{% endfor %}"
)
# Turns begin with a special token and end with nothing.
HEADERS_ONLY = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}" + GENERATION
# Only the last turn is ended, by another token than the others.
OTHER_LAST_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.role == 'assistant' and loop.last %}<|im_end|>{% else %}<pad>{% endif %}{% endfor %}" + GENERATION
)
WORDS = (
    "{% for m in messages %}{{ m.role | title }}:\n{{ m.content }}\n###\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:\n{% endif %}"
)
TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.name }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    + GENERATION
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}" + GENERATION
)


def talk(*contents: str) -> list[dict]:
    return [{"role": "user" if n % 2 == 0 else "assistant", "content": text} for n, text in enumerate(contents)]


def trained(template: str, messages: list[dict], *, first: int = 0) -> list[str]:
    """The trained pieces of text, after a way through the tokens."""
    tokenizer = make_tokenizer(chat_template=template)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("</tool_call>", special=False)])
    marked = mark_assistant(tokenizer, messages, first=first)
    ids, mask = encode_marked(tokenizer, marked.text, marked.spans)
    assert tokenizer.decode(ids) == marked.text
    pieces, run = [], []
    for token, wanted in zip([*ids, None], [*mask, False], strict=True):
        if wanted:
            run.append(token)
        elif run:
            pieces.append(tokenizer.decode(run))
            run = []
    assert pieces == [marked.text[start:stop] for start, stop in marked.spans]
    return pieces


def test_every_assistant_turn_is_trained_with_the_token_that_ends_it_and_nothing_else():
    messages = talk("one", "two", "three", " four \n")
    assert trained(CHAT_TEMPLATE, messages) == ["two<|im_end|>", " four \n<|im_end|>"]


def test_only_turns_from_the_first_wanted_message_on_are_trained():
    assert trained(CHAT_TEMPLATE, talk("one", "two", "three", "four"), first=2) == ["four<|im_end|>"]


def test_a_template_that_drops_earlier_reasoning_is_followed():
    messages = talk("q1", "<think> t1 </think> a1", "q2", "<think> t2 </think> a2")
    assert trained(THINKING, messages) == ["a1<|im_end|>", "<think>\nt2\n</think>\n\na2<|im_end|>"]


def test_an_empty_reasoning_that_the_template_writes_is_trained_where_the_model_has_to_write_it():
    assert trained(THINKING, talk("q1", "a1", "q2", "a2")) == [
        "a1<|im_end|>",
        "<think>\n\n</think>\n\na2<|im_end|>",
    ]


def test_a_generation_prompt_that_opens_the_reasoning_does_not_hide_the_turns_of_the_history():
    messages = talk("q1", "<think>\nt\n</think>a1", "q2", "a2")
    assert trained(OPENED_THINKING, messages) == ["a1<|im_end|>", "a2<|im_end|>"]


def test_a_template_without_generation_prompt_is_followed():
    assert trained(INST, talk("q1", " a1", "q2", "a2 ")) == [" a1 <|im_end|>", " a2 <|im_end|>"]


def test_the_header_of_the_next_turn_is_never_taken_for_the_end_of_a_turn():
    assert trained(HEADERS_ONLY, talk("q1", "a1", "q2", "a2")) == ["a1", "a2"]
    assert not mark_assistant(make_tokenizer(chat_template=HEADERS_ONLY), talk("q1", "a1")).closed


def test_an_end_that_only_the_last_turn_has_is_trained_there_alone():
    assert trained(OTHER_LAST_END, talk("q1", "a1", "q2", "a2")) == ["a1", "a2<|im_end|>"]


def test_words_that_end_a_turn_are_trained_with_it():
    assert trained(WORDS, talk("q1", "a1", "q2", "a2")) == ["a1\n###", "a2\n###"]


def test_tool_calls_belong_to_the_turn_and_tool_results_do_not():
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "look"}, {"name": "sum"}]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "it is 3"},
    ]
    assert trained(TOOLS, messages) == [
        "<tool_call>look</tool_call><tool_call>sum</tool_call><|im_end|>",
        "it is 3<|im_end|>",
    ]


def test_content_that_looks_like_the_template_does_not_move_the_spans():
    messages = talk("say <|im_start|>assistant\n", "<|im_end|>\n<|im_start|>assistant\n", "q", "q")
    assert trained(CHAT_TEMPLATE, messages) == ["<|im_end|>\n<|im_start|>assistant\n<|im_end|>", "q<|im_end|>"]


def test_an_assistant_message_may_come_first_and_twice_in_a_row():
    messages = [{"role": "assistant", "content": "hi"}, {"role": "assistant", "content": "there"}]
    assert trained(CHAT_TEMPLATE, messages) == ["hi<|im_end|>", "there<|im_end|>"]


def test_what_the_template_itself_marks_is_trained():
    messages = talk("one", "two", "three", "four")
    assert trained(MARKED, messages) == ["two<|im_end|>", "four<|im_end|>"]
    assert trained(MARKED, messages, first=2) == ["four<|im_end|>"]


def test_a_template_that_entangles_messages_is_an_error_and_not_a_guess():
    counting = (
        "{% for m in messages %}{{ m.content }}|{% endfor %}{{ (messages | map(attribute='content') | join) | length }}"
    )
    with pytest.raises(ValueError, match="cannot be found with certainty.*generation"):
        mark_assistant(make_tokenizer(chat_template=counting), talk("q", "a"))
    twice = "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="cannot be found with certainty"):
        mark_assistant(make_tokenizer(chat_template=twice), talk("q", "a"))


def test_a_template_that_refuses_a_part_of_the_conversation_is_an_error_that_names_the_remedy():
    template = CHAT_TEMPLATE.replace(
        "{% for", "{% if messages | length < 3 %}{{ raise_exception('no') }}{% endif %}{% for", 1
    )
    messages = talk("a", "b", "c", "d")
    with pytest.raises(ValueError, match="cannot be found with certainty.*generation"):
        mark_assistant(make_tokenizer(chat_template=template), messages)


def test_words_with_a_marked_blank_in_front_are_trained_whole():
    """As Llama's tokenizers cut: the blank belongs to the word behind it."""
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(special_tokens=["<unk>", "<|im_end|>"], vocab_size=200, show_progress=False)
    inner.train_from_iterator(["[INST] what is it [/INST] an apple and a pear"] * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", unk_token="<unk>")
    tokenizer.chat_template = INST
    marked = mark_assistant(tokenizer, talk("what is it", "an apple", "and it", "a pear"))
    ids, mask = encode_marked(tokenizer, marked.text, marked.spans)
    trained_tokens = [token for token, wanted in zip(ids, mask, strict=True) if wanted]
    pieces = tokenizer.convert_ids_to_tokens(trained_tokens)
    assert "".join(pieces).replace("▁", " ") == " an apple <|im_end|> a pear <|im_end|>"


def test_a_conversation_without_assistant_is_an_error():
    with pytest.raises(ValueError, match="no assistant message"):
        mark_assistant(make_tokenizer(), talk("q"))


@pytest.mark.parametrize(
    ("template", "end"), [(CHAT_TEMPLATE, "<|im_end|>"), (INST, "<|im_end|>"), (HEADERS_ONLY, ""), (WORDS, "")]
)
def test_the_token_that_ends_a_turn_is_read_off_the_template(template, end):
    assert turn_end(make_tokenizer(chat_template=template)) == end


def test_masks_of_reasoning_that_was_dropped_are_exact_to_the_token():
    """Word tokens; the template drops the first turn's reasoning."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[U] {{ m.content }} [E] {% else %}[A] "
        "{{ m.content if loop.last else m.content.split('</think> ')[-1] }} [E] {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[A] {% endif %}"
    )
    words = ["[U]", "[A]", "[E]", "q1", "q2", "a1", "a2", "t1", "t2", "<think>", "</think>"]
    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[U]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, additional_special_tokens=["[U]", "[A]"], eos_token="[E]"
    )
    tokenizer.chat_template = template
    marked = mark_assistant(tokenizer, talk("q1", "<think> t1 </think> a1", "q2", "<think> t2 </think> a2"))
    ids, mask = encode_marked(tokenizer, marked.text, marked.spans)
    rendered = "[U] q1 [E] [A] a1 [E] [U] q2 [E] [A] <think> t2 </think> a2 [E]".split()
    assert tokenizer.convert_ids_to_tokens(ids) == rendered
    assert [int(wanted) for wanted in mask] == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    # Aligned to the step that predicts a token, as other frameworks count.
    assert [int(wanted) for wanted in mask[1:]] == [0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1]


def test_packed_rows_keep_each_its_spans_and_nothing_crosses_from_row_to_row():
    masks = [torch.tensor([0, 0, 1, 1, 0, 0, 1]), torch.tensor([0, 1, 1, 0, 0])]
    batch = pack_rows([[5] * 7, [6] * 5], masks)
    where = batch.action_mask.nonzero().flatten().tolist()
    assert where == [2, 3, 6, 8, 9]
    assert batch.action_mask[1:].int().tolist() == [0, 1, 1, 0, 0, 1, 0, 1, 1, 0, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]


def byte_tokenizer(trim_offsets: bool, merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: n for n, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_blanks_that_a_tokenizer_leaves_out_of_its_offsets_and_bytes_of_one_character_are_placed(trim_offsets):
    tokenizer = byte_tokenizer(trim_offsets, [("Ġ", "a"), ("Ċ", "Ċ")])
    text = "q:\n\n\n a é \n"
    span = (text.index(" a"), text.index(" \n"))
    ids, mask = encode_marked(tokenizer, text, [span])
    pieces = [token for token, wanted in zip(tokenizer.convert_ids_to_tokens(ids), mask, strict=True) if wanted]
    assert pieces == ["Ġa", "Ġ", "Ã", "©"]


def test_a_token_over_the_border_belongs_to_the_span_where_only_blanks_lie_outside():
    tokenizer = byte_tokenizer(False, [("Ġ", "a"), (":", "a")])
    ids, mask = encode_marked(tokenizer, "q a", [(2, 3)])
    assert mask == [False, True]
    with pytest.raises(ValueError, match="':a' holds text of the assistant and of the template"):
        encode_marked(tokenizer, "q:a", [(2, 3)])
