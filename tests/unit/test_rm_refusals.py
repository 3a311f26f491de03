"""What train_rm says about settings, data and models that it cannot use: one sentence, before processes meet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForSequenceClassification

from openrlhf.cli.train_rm import main
from tests.tiny_models import make_tiny_model, make_tokenizer

GOOD = '{"q": "1 + 1", "chosen": "2", "rejected": "3", "margin": 1}\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def words(model: Path, data: Path, folder: Path, *flags: str) -> list[str]:
    given = ["--model.model_name_or_path", str(model), "--data.dataset", str(data), "--device", "cpu"]
    given += ["--data.prompt_key", "q", "--train.batch_size", "1"]
    return [*given, "--ckpt.output_dir", str(folder / "out"), "--ckpt.path", str(folder / "states"), *flags]


@pytest.mark.parametrize(
    ("content", "flags", "said"),
    [
        (GOOD + '{"q": "1", "chosen": "2"}\n', [], ["a.jsonl, row 2", "no column 'rejected'", "(columns: q, chosen)"]),
        (GOOD + '{"q": "", "chosen": "2", "rejected": "3"}\n', [], ["a.jsonl, row 2", "the prompt is empty"]),
        (GOOD + '{"q": "1", "chosen": null, "rejected": "3"}\n', [], ["row 2", "column 'chosen'", "found null"]),
        ('{"q": "1", "chosen": "2", "rejected": "3"}\n', ["--model.margin_loss_enable"], ["row 1", "'margin'"]),
        ('{"q": "1", "chosen": "2", "rejected": "2"}\n', [], ["none of the 1 pairs", "in 1 chosen and rejected are"]),
        (GOOD, ["--data.max_len", "3"], ["none of the 1 pairs", "--data.max_len 3"]),
        (GOOD, ["--model.loss_type", "hinge"], ["--model.loss_type must be one of sigmoid, logexp, found 'hinge'"]),
        (GOOD, ["--data.rejected_key", "chosen"], ["--data.chosen_key and --data.rejected_key both name"]),
        (GOOD, ["--data.max_len", "4096"], ["--data.max_len 4096", "2048"]),
        (GOOD, ["--data.apply_chat_template", "--data.prompt_key", "None"], ["row 1", "name the prompt's column"]),
    ],
)
def test_unusable_settings_and_data_end_in_one_sentence_and_status_2(content, flags, said, model, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(SystemExit) as stopped:
        main(words(model, tmp_path / "a.jsonl", tmp_path, *flags))
    message = capsys.readouterr().err
    assert stopped.value.code == 2
    assert "Traceback" not in message
    for part in said:
        assert part in message
    assert not (tmp_path / "out").exists()


def test_a_model_that_cannot_be_given_a_scalar_head_is_named(tmp_path, capsys):
    config = AutoConfig.for_model("mamba", vocab_size=512, hidden_size=32, num_hidden_layers=1)
    config.save_pretrained(tmp_path / "mamba")
    make_tokenizer().save_pretrained(tmp_path / "mamba")
    (tmp_path / "a.jsonl").write_text(GOOD)
    with pytest.raises(SystemExit) as stopped:
        main(words(tmp_path / "mamba", tmp_path / "a.jsonl", tmp_path))
    assert stopped.value.code == 2
    assert "--model.model_name_or_path" in (said := capsys.readouterr().err) and "cannot be given a scalar head" in said


@pytest.mark.parametrize("labels", [1, 3])
def test_a_dry_run_plans_pairs_and_says_that_a_trained_head_is_not_taken_over(labels, model, tmp_path, capsys):
    judge = AutoModelForSequenceClassification.from_pretrained(model, num_labels=labels)
    judge.save_pretrained(tmp_path / "judge")
    make_tokenizer().save_pretrained(tmp_path / "judge")
    (tmp_path / "a.jsonl").write_text("".join(GOOD.replace("3", str(n)) for n in range(10, 15)))
    (tmp_path / "b.jsonl").write_text(GOOD)
    flags = ["--train.batch_size", "3", "--train.micro_batch_size", "2", "--dry_run", "--ds.value_head_prefix", "head"]
    flags += ["--eval.dataset", str(tmp_path / "b.jsonl"), "--eval.steps", "1", "--model.compute_fp32_loss_enable"]
    main(words(tmp_path / "judge", tmp_path / "a.jsonl", tmp_path, *flags, "--data.max_len", "64"))
    out, err = capsys.readouterr()
    assert "Plan of train_rm" in out and "5 pairs" in out and "2 to 3 pairs" in out
    assert " pairs of a forward  up to 2 a rank" in out and "b.jsonl: 1 rows" in out
    assert "has a head for sequence classification; a new one takes its place" in err
    assert "--ds.value_head_prefix has no effect here" in err
    assert "--model.compute_fp32_loss_enable has no effect here" in err
    assert not (tmp_path / "out").exists()


def test_a_template_without_a_prompt_column_is_said_to_have_no_effect(model, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps({"chosen": "q a", "rejected": "q b"}) + "\n")
    flags = ["--data.prompt_key", "None", "--data.input_template", "Q {}", "--dry_run"]
    main(words(model, tmp_path / "a.jsonl", tmp_path, *flags))
    assert "--data.input_template has no effect without --data.prompt_key" in capsys.readouterr().err
