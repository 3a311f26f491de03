"""Rows that are tokenised when their turn comes are the rows of a data set that is tokenised whole."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from openrlhf.config import ConfigError, check
from openrlhf.data import streaming
from openrlhf.data.errors import DataError
from openrlhf.data.preference import PreferenceDataset, PreferenceFormat
from openrlhf.data.sft import SFTDataset, SFTFormat
from openrlhf.data.sources import load_dataset_mix
from openrlhf.data.streaming import FIRST_ROWS, StreamedRows
from openrlhf.trainer.sft import SFTObjective
from openrlhf.trainer.streamed import StreamedObjective
from tests.tiny_models import PAD_ID, make_tokenizer
from tests.unit.config_args import DPO, RM, SFT, built, checked, make_files

FORM = SFTFormat(output_key="output", input_template="User: {}\nAssistant: ")


def write(path: Path, rows: list) -> str:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(spec: str, probs: str | None = None, limit: int = 10**6):
    return load_dataset_mix(spec, probs, split="train", max_samples=limit, seed=3)


def sums(count: int) -> list[dict]:
    return [{"input": f"{n} + {n}", "output": f"{2 * n} " * (1 + n % 4)} for n in range(count)]


def streamed(rows, max_len: int = 60) -> StreamedRows:
    tokenizer = make_tokenizer()
    return StreamedRows(rows, lambda part: SFTDataset(part, tokenizer, FORM, max_len=max_len))


def test_a_window_holds_the_records_of_a_data_set_that_is_tokenised_whole_in_any_order(tmp_path):
    spec = f"{write(tmp_path / 'a.jsonl', sums(9))},{write(tmp_path / 'b.jsonl', sums(5))}"
    for probs, limit in ((None, 99), ("0.3,0.7", 99), ("0.3,0.7", 11)):
        rows = load(spec, probs, limit)
        whole = SFTDataset(rows, make_tokenizer(), FORM, max_len=60)
        data = streamed(rows)
        assert len(data) == len(whole)
        for items in ([3], [7, 0, 10], list(range(len(rows)))[::-1]):
            window = data.window(items)
            assert [record.tokens for record in window] == [whole[item].tokens for item in items]
            assert all((record.loss_mask == whole[item].loss_mask).all() for record, item in zip(window, items))  # noqa: B905


def test_an_objective_over_a_window_counts_and_packs_the_asked_rows(tmp_path):
    rows = load(write(tmp_path / "a.jsonl", sums(9)))
    whole = SFTObjective(SFTDataset(rows, make_tokenizer(), FORM, max_len=60), PAD_ID)
    part = StreamedObjective(streamed(rows), partial(SFTObjective, pad_token_id=PAD_ID))
    assert part.num_items == whole.num_items == 9
    objective, items = part.window([8, 2, 5])
    assert objective.units(items) == whole.units([8, 2, 5])
    assert objective.pack(items).tokens.tolist() == whole.pack([8, 2, 5]).tokens.tolist()


def test_rows_of_which_nothing_can_be_learned_are_left_out_of_their_step_and_counted(tmp_path):
    rows = sums(6)
    rows[1] = {"input": "long " * 90, "output": "a"}
    rows[4] = {"input": "q", "output": "long " * 90}
    data = streamed(load(write(tmp_path / "a.jsonl", rows)))
    assert len(data.window([0, 1, 4])) == 2
    assert data.window([1]) is None
    objective = StreamedObjective(data, partial(SFTObjective, pad_token_id=PAD_ID))
    assert objective.window([1, 1]) == (objective, [])
    assert data.closing() == "6 rows were met, 2 of them cut, 4 left out as unusable"


def test_pairs_that_teach_nothing_are_left_out_and_counted(tmp_path):
    rows = load(
        write(tmp_path / "a.jsonl", [{"chosen": "q yes", "rejected": "q no"}, {"chosen": "q yes", "rejected": "q yes"}])
    )
    tokenizer = make_tokenizer()
    form = PreferenceFormat()
    data = StreamedRows(rows, lambda part: PreferenceDataset(part, tokenizer, form, max_len=60))
    assert len(data.window([1, 0])) == 1
    assert data.closing() == "2 rows were met, 0 of them cut, 1 left out as unusable"


def test_a_bad_row_is_named_when_its_turn_comes_and_one_of_the_first_at_the_start(tmp_path):
    rows = sums(FIRST_ROWS + 2)
    rows[FIRST_ROWS + 1] = {"input": "q"}
    data = streamed(load(write(tmp_path / "a.jsonl", rows)))
    data.window([FIRST_ROWS])
    with pytest.raises(DataError, match=f"a.jsonl, row {FIRST_ROWS + 2}: there is no column 'output'.*input"):
        data.window([3, FIRST_ROWS + 1])
    with pytest.raises(DataError, match="b.jsonl, row 3: the line is not JSON"):
        streamed(load(write(tmp_path / "b.jsonl", [*sums(2), "{broken\n", *sums(2)])))
    with pytest.raises(DataError, match="none of the 2 rows has a trained token within --data.max_len 5"):
        streamed(load(write(tmp_path / "c.jsonl", sums(2))), max_len=5)


@pytest.mark.parametrize("workers", [0, 1])
def test_data_is_taken_whose_first_rows_teach_nothing_and_refused_where_no_row_does(workers, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "FIRST_ROWS", 3)
    useless = [{"input": "long " * 90, "output": "a"}] * 6
    tokenise = partial(SFTDataset, tokenizer=make_tokenizer(), form=FORM, max_len=60)
    data = StreamedRows(load(write(tmp_path / "a.jsonl", [*useless, *sums(3)])), tokenise, workers=workers)
    try:
        rows = load(write(tmp_path / "b.jsonl", sums(3)))
        assert data.largest_token == tokenise(rows).largest_token
        assert data.window([0]) is None and len(data.window([7, 1])) == 1
        assert data.closing() == "3 rows were met, 1 of them cut, 2 left out as unusable"
    finally:
        data.close()

    said = "c.jsonl: none of the 3 rows has .* raise it; the same goes for the 3 behind them$"
    with pytest.raises(DataError, match=said):
        StreamedRows(load(write(tmp_path / "c.jsonl", useless)), tokenise, workers=workers)


def test_files_that_have_to_be_read_whole_are_named_and_lines_of_json_are_not(tmp_path):
    lines = write(tmp_path / "a.jsonl", sums(2))
    (tmp_path / "b.json").write_text(json.dumps(sums(2)))
    (tmp_path / "c.csv").write_text("input,output\nq,a\n")
    data = streamed(load(f"{lines},{tmp_path / 'b.json'},{tmp_path / 'c.csv'}"))
    assert data.in_memory == [str(tmp_path / "b.json"), str(tmp_path / "c.csv")]


def test_tokens_are_checked_in_every_row_that_is_tokenised_and_the_largest_of_the_first_is_known(tmp_path):
    rows = load(write(tmp_path / "a.jsonl", [*sums(FIRST_ROWS), {"input": "q", "output": "hello world"}]))
    data = streamed(rows)
    known = SFTDataset(rows.take(FIRST_ROWS), make_tokenizer(), FORM, max_len=60).largest_token
    assert data.largest_token == known
    assert data.summary() == f"{FIRST_ROWS + 1} rows, tokenised when their turn comes (--data.streaming)"

    seen: list[int] = []
    data.check_tokens(seen.append)
    for items in ([0, 5], [FIRST_ROWS]):
        assert data.window(items).largest_token == seen[-1]
    assert len(seen) == 2 and seen[0] != seen[1]

    def refuse(largest):
        raise ConfigError(f"token {largest}")

    data.check_tokens(refuse)
    with pytest.raises(ConfigError, match=f"token {seen[1]}"):
        data.window([FIRST_ROWS])


def test_streaming_is_a_flag_of_all_supervised_commands_and_excludes_a_reference_that_is_asked_before(
    tmp_path, monkeypatch
):
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    for command, words in (("train_sft", SFT), ("train_rm", RM), ("train_dpo", DPO)):
        assert checked(built(command, words, "--data.streaming")).data.streaming
    with pytest.raises(ConfigError, match="--ref.precompute asks the reference about all pairs .*--data.streaming"):
        check(built("train_dpo", DPO, "--data.streaming", "--ref.precompute"))
