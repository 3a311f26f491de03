"""What train_dpo says about settings, models and data that it cannot use: one sentence, before processes meet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openrlhf.cli.train_dpo import main
from tests.tiny_models import make_tiny_model

GOOD = '{"q": "1 + 1", "chosen": "2", "rejected": "3"}\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def words_for(model: Path, folder: Path, content: str) -> list[str]:
    (folder / "a.jsonl").write_text(content)
    words = ["--model.model_name_or_path", str(model), "--data.dataset", str(folder / "a.jsonl"), "--device", "cpu"]
    words += ["--data.prompt_key", "q", "--train.batch_size", "1", "--ds.param_dtype", "fp32"]
    return [*words, "--ckpt.output_dir", str(folder / "out"), "--ckpt.path", str(folder / "states")]


@pytest.mark.parametrize(
    ("content", "flags", "said"),
    [
        (GOOD + '{"q": "1", "chosen": "2"}\n', [], ["a.jsonl, row 2", "no column 'rejected'", "--data.rejected_key"]),
        (GOOD + '{"q": "1", "chosen": null, "rejected": "2"}\n', [], ["a.jsonl, row 2", "found null"]),
        (GOOD, ["--model.ipo_enable", "--model.loss_type", "orpo"], ["--model.ipo_enable", "two losses; keep one"]),
        (GOOD, ["--model.ipo_enable", "--model.label_smoothing", "0.1"], ["--model.label_smoothing 0.1", "loss ipo"]),
        (GOOD, ["--model.loss_type", "spo"], ["--model.loss_type must be one of dpo, ipo, kto, orpo, simpo", "'spo'"]),
        (GOOD, ["--model.loss_type", "kto"], ["--model.loss_type kto", "--train.batch_size 1 has only one"]),
        (GOOD, ["--model.loss_type", "kto", "--ref.precompute"], ["--ref.precompute does not go with", "kto"]),
        (GOOD, ["--model.beta", "0"], ["--model.beta must be above 0"]),
        (GOOD, ["--model.label_smoothing", "0.5"], ["--model.label_smoothing must be at least 0 and below 0.5"]),
        (GOOD, ["--model.simpo_gamma", "-1"], ["--model.simpo_gamma must be 0 or more"]),
        (GOOD, ["--ref.model_name_or_path", "./nowhere"], ["--ref.model_name_or_path ./nowhere is not a model folder"]),
        (GOOD, ["--ds.lora.rank", "8", "--ds.lora.target_modules", "q"], ["--ds.lora.target_modules q: no module"]),
        (GOOD, ["--data.chosen_key", "rejected"], ["--data.chosen_key", "--data.rejected_key"]),
    ],
)
def test_what_cannot_be_used_ends_in_one_sentence_and_status_2(content, flags, said, model, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*words_for(model, tmp_path, content), *flags])
    message = capsys.readouterr().err
    assert stopped.value.code == 2
    assert "Traceback" not in message and len(message.strip().splitlines()) == 1
    for part in said:
        assert part in message
    assert not (tmp_path / "out").exists()


def test_a_reference_that_calls_tokens_otherwise_is_refused_and_one_without_a_tokenizer_is_not(model, tmp_path, capsys):
    other = make_tiny_model(tmp_path / "other")
    file = other / "tokenizer.json"
    table = json.loads(file.read_text())
    vocab = table["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[10:12]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(table))
    words = [*words_for(model, tmp_path, GOOD), "--ref.model_name_or_path", str(other), "--dry_run"]
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert (
        f"--ref.model_name_or_path {other} reads the token ids of the model that is trained" in capsys.readouterr().err
    )
    for part in ("tokenizer.json", "tokenizer_config.json"):
        (other / part).unlink()
    main(words)
    assert "reference" in capsys.readouterr().out


def test_a_dry_run_says_which_reference_is_asked_when_and_what_it_takes(model, tmp_path, capsys):
    words = [*words_for(model, tmp_path, GOOD), "--dry_run"]
    main(words)
    beside = capsys.readouterr().out
    assert "during training" in beside and "updates an epoch  1 of 1 pairs" in " ".join(beside.split("  "))
    main([*words, "--ref.precompute"])
    before = capsys.readouterr().out
    assert "once, before the other is loaded" in before
    main([*words, "--model.loss_type", "orpo"])
    without = capsys.readouterr().out
    assert "\nreference" not in without
    columns = [text.partition("estimated")[2].splitlines()[1].split() for text in (beside, before, without)]
    assert columns == [["model", "reference"], ["model"], ["model"]]
    assert not (tmp_path / "out").exists()
