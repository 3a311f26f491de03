"""What train_sft says about settings and data that it cannot use: one sentence, before any process meets another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openrlhf.cli.train_sft import main
from tests.tiny_models import make_tiny_model, make_tokenizer

GOOD = '{"q": "1 + 1", "a": "2"}\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("name", "content", "flags", "said"),
    [
        ("a.jsonl", GOOD + '{"q": "1 + 1", "a": ', [], ["a.jsonl, row 2: the line is not JSON"]),
        ("a.jsonl", GOOD + '{"q": "1", "b": "2"}\n', [], ["a.jsonl, row 2", "no column 'a'", "(columns: q, b)"]),
        ("a.jsonl", GOOD + '{"q": "", "a": "2"}\n', [], ["a.jsonl, row 2", "the prompt is empty"]),
        ("a.jsonl", GOOD + '{"q": "1", "a": 2}\n', [], ["a.jsonl, row 2", "column 'a': expected text, found int"]),
        ("a.jsonl", GOOD + "[1]\n", [], ["a.jsonl, row 2: expected an object"]),
        ("a.jsonl", "", [], ["a.jsonl: the file is empty"]),
        ("a.jsonl", "\n\n", [], ["a.jsonl: the data set has no rows"]),
        ("a.json", "[]", [], ["a.json: the data set has no rows"]),
        ("a.jsonl", GOOD, ["--data.max_len", "3"], ["none of the 1 rows", "--data.max_len 3"]),
        ("a.jsonl", GOOD, ["--data.input_template", "Q: {} {}"], ["--data.input_template"]),
        ("a.csv", "q,a\n1 + 1,2\n1 + 2,\n", [], ["a.csv, row 2: column 'a': expected a response, found an empty cell"]),
        ("a.csv", "q,a\n1 + 1,2\n,3\n", [], ["a.csv, row 2", "the prompt is empty"]),
        ("a.csv", "q,a\n", [], ["a.csv: the data set has no rows"]),
        ("a.jsonl", GOOD + '{"q": "\\ud800", "a": "2"}\n', [], ["a.jsonl, row 2: \\ud800 is half of a character"]),
        ("a.xyz", GOOD, [], ["cannot read a .xyz", ".parquet"]),
    ],
)
def test_unusable_data_ends_in_one_sentence_and_status_2(name, content, flags, said, model, tmp_path, capsys):
    (tmp_path / name).write_text(content)
    words = ["--model.model_name_or_path", str(model), "--data.dataset", str(tmp_path / name), "--device", "cpu"]
    words += ["--data.input_key", "q", "--data.output_key", "a", "--train.batch_size", "1", *flags]
    words += ["--ckpt.output_dir", str(tmp_path / "out"), "--ckpt.path", str(tmp_path / "states")]
    with pytest.raises(SystemExit) as stopped:
        main(words)
    message = capsys.readouterr().err
    assert stopped.value.code == 2
    assert "Traceback" not in message
    for part in said:
        assert part in message
    assert not (tmp_path / "out").exists()


def test_a_model_without_chat_template_is_refused_with_the_flag_that_gives_one(tmp_path, capsys):
    make_tiny_model(tmp_path / "model", tokenizer=False)
    make_tokenizer(chat_template=None).save_pretrained(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text(json.dumps({"input": [{"role": "assistant", "content": "a"}]}) + "\n")
    words = ["--model.model_name_or_path", str(tmp_path / "model"), "--data.dataset", str(tmp_path / "a.jsonl")]
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--data.apply_chat_template", "--device", "cpu", "--train.batch_size", "1"])
    assert stopped.value.code == 2
    assert "--data.tokenizer_chat_template" in capsys.readouterr().err
