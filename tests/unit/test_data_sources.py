"""Data sets in every form that people keep them in."""

from __future__ import annotations

import json
import pickle
import warnings
from collections import Counter
from pathlib import Path

import datasets
import pyarrow as pa
import pytest

from openrlhf.config.errors import ConfigError
from openrlhf.data.errors import DataError
from openrlhf.data.sources import load_dataset_mix

ROWS = [{"input": f"question {n}", "answer": n} for n in range(3)]


def lines(path: Path, rows: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(spec: object, *, split: str = "train", probs: str | None = None, max_samples: int = 10**9, seed: int = 0):
    return load_dataset_mix(str(spec), probs, split=split, max_samples=max_samples, seed=seed)


def inputs(rows) -> list[str]:
    return [row["input"] for row in rows]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def make(form: str, folder: Path) -> str:
    data = datasets.Dataset.from_list(ROWS)
    if form == "json":
        (folder / "a.json").write_text(json.dumps(ROWS))
    elif form == "json that holds lines":
        lines(folder / "a.json", ROWS)
        return str(folder / "a.json")
    elif form == "json with a wrapper":
        (folder / "a.json").write_text(json.dumps({"data": ROWS}, indent=1))
        return str(folder / "a.json")
    elif form in ("jsonl", "JSONL"):
        lines(folder / f"a.{form}", ROWS)
    elif form == "csv":
        data.to_csv(folder / "a.csv")
    elif form in ("parquet", "Parquet"):
        data.to_parquet(folder / f"a.{form}")
    elif form == "arrow":
        with pa.OSFile(str(folder / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, data.data.table.schema) as writer:
            writer.write_table(data.data.table)
    elif form == "folder":
        lines(folder / "set" / "a.jsonl", ROWS[:2])
        lines(folder / "set" / "b.jsonl", ROWS[2:])
        return str(folder / "set")
    elif form == "folder with parts":
        lines(folder / "set" / "train-00000-of-00001.jsonl", ROWS)
        lines(folder / "set" / "test.jsonl", ROWS[:1])
        (folder / "set" / "dataset_infos.json").write_text("{}")
        return str(folder / "set")
    elif form == "folder of folders":
        lines(folder / "set" / "data" / "train" / "a.jsonl", ROWS)
        lines(folder / "set" / "data" / "test" / "a.jsonl", ROWS[:1])
        return str(folder / "set")
    elif form == "saved":
        data.save_to_disk(folder / "saved")
        return str(folder / "saved")
    elif form == "saved dict":
        datasets.DatasetDict(train=data, test=data.select([0])).save_to_disk(folder / "saved")
        return str(folder / "saved")
    elif form == "subfolder":
        lines(folder / "root" / "sub" / "a.jsonl", ROWS)
        lines(folder / "root" / "other" / "a.jsonl", ROWS[:1])
        return f"{folder / 'root'}@sub"
    elif form == "subfolder that was saved":
        data.save_to_disk(folder / "root" / "sub")
        return f"{folder / 'root'}@sub"
    elif form == "list":
        first = lines(folder / "a.jsonl", ROWS[:1])
        second = lines(folder / "b.jsonl", ROWS[1:])
        return f" {first} , {second},"
    else:
        raise AssertionError(form)
    return str(folder / f"a.{form}")


@pytest.mark.parametrize(
    "form",
    [
        "json",
        "json that holds lines",
        "json with a wrapper",
        "jsonl",
        "JSONL",
        "csv",
        "parquet",
        "Parquet",
        "arrow",
        "folder",
        "folder with parts",
        "folder of folders",
        "saved",
        "saved dict",
        "subfolder",
        "subfolder that was saved",
        "list",
    ],
)
def test_every_local_form_loads_the_same_three_rows(form, tmp_path):
    rows = load(make(form, tmp_path))
    # Only a CSV has no types.
    expected = [{key: str(value) for key, value in row.items()} for row in ROWS] if form == "csv" else ROWS
    assert [{key: row[key] for key in ("input", "answer")} for row in rows] == expected
    assert rows.column_names == ["input", "answer"]


@pytest.mark.parametrize("form", ["folder with parts", "folder of folders", "saved dict"])
def test_the_asked_split_is_loaded_and_a_missing_one_is_an_error_that_names_those_there(form, tmp_path):
    spec = make(form, tmp_path)
    assert inputs(load(spec, split="test")) == ["question 0"]
    assert inputs(load(f"{spec}@test")) == ["question 0"]
    with pytest.raises(DataError, match="no split 'validation'.*train") as caught:
        load(spec, split="validation")
    assert "test" in str(caught.value)


def test_a_split_goes_by_its_usual_names(tmp_path):
    lines(tmp_path / "my_training_data.jsonl", ROWS)
    lines(tmp_path / "val.jsonl", ROWS[:1])
    assert len(load(tmp_path)) == 3
    assert len(load(tmp_path, split="validation")) == 1
    assert len(load(tmp_path, split="val")) == 1


def test_files_that_name_no_split_beside_files_that_do_are_named(tmp_path):
    lines(tmp_path / "train.jsonl", ROWS)
    lines(tmp_path / "extra.jsonl", ROWS)
    with pytest.warns(UserWarning, match="extra.jsonl"):
        assert len(load(tmp_path)) == 3


def test_a_set_that_was_saved_whole_has_no_other_split(tmp_path):
    with pytest.raises(DataError, match="no split 'test'"):
        load(make("saved", tmp_path), split="test")


def test_a_plain_file_serves_as_any_split_and_says_so(tmp_path):
    file = lines(tmp_path / "held_out.jsonl", ROWS)
    with pytest.warns(UserWarning, match="without splits.*'test'"):
        assert len(load(file, split="test")) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(file)


def test_values_of_any_json_type_in_one_column_come_through_unchanged(tmp_path):
    labels = [1, 1.0, "1", True, None, [1, "a"], {"a": 1}, {"b": [2]}, "2024-01-01T00:00:00", 10**30, ""]
    for file in (lines(tmp_path / "a.jsonl", [{"label": label} for label in labels]), tmp_path / "a.json"):
        if file.suffix == ".json":
            file.write_text(json.dumps([{"label": label} for label in labels]))
        loaded = [row["label"] for row in load(file)]
        assert loaded == labels
        assert list(map(type, loaded)) == list(map(type, labels))


@pytest.mark.parametrize(("suffix", "separator"), [("csv", ","), ("TSV", "\t")])
def test_a_cell_is_the_text_that_stands_in_it_whatever_it_looks_like_and_whatever_stands_in_other_rows(
    suffix, separator, tmp_path
):
    cells = ["07", "7", "1e5", "0x1F", "1_000", "True", "None", "NA", "nan", "", " x ", "2024-01-01", "1.10", "[1]"]
    file = tmp_path / f"a.{suffix}"
    file.write_text("".join(f"{a}{separator}{b}\n" for a, b in [("input", "label"), *(("q", cell) for cell in cells)]))
    assert [row["label"] for row in load(file)] == cells
    for cell in cells:
        file.write_text(f"input{separator}label\nq{separator}{cell}\n")
        assert [row["label"] for row in load(file)] == [cell]


def test_quotes_line_ends_blank_lines_and_long_cells_of_a_csv_are_read_as_spreadsheets_write_them(tmp_path):
    long = "x" * 200_000
    text = f'\ufeffinput,label\r\n"a,b\nc","say ""hi"""\r\n\r\n{long},é\r\nshort\r\n'
    (tmp_path / "a.csv").write_text(text, newline="")
    rows = load(tmp_path / "a.csv")
    assert [(row["input"], row.get("label")) for row in rows] == [
        ("a,b\nc", 'say "hi"'),
        (long, "é"),
        ("short", None),
    ]
    assert [row["__row__"] for row in rows] == [1, 2, 3]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"input,label\n", "a.csv: the data set has no rows"),
        (b"input,label", "a.csv: the data set has no rows"),
        (b"\n\n", "a.csv: the first line is no header"),
        (b"input,label,input\nx,1,2\n", "a.csv: the header names 'input' twice"),
        (b"input,label\nx,1\ny,1,2\n", "a.csv, row 2: the row has 3 cells and the header names 2 columns"),
        (b'input,label\nx,1\ny,"1\n', "a.csv, row 2: the row cannot be read"),
        (b"input,label\nx,1\ny,2\nz,\xff\n", "a.csv, row 3: the row cannot be read"),
    ],
)
def test_a_csv_that_cannot_be_read_is_named_with_its_row(content, said, tmp_path):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError) as caught:
        load(tmp_path / "a.csv")
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize("place", ['{"input": "%s"}', '{"%s": 1}', '{"input": [{"content": "x %s y"}]}'])
@pytest.mark.parametrize("half", ["\\ud800", "\\uDFFF", "\\ude00\\ud83d"])
def test_half_of_a_character_is_named_by_file_and_row_and_a_whole_pair_is_text(name, place, half, tmp_path):
    good = place % "\\ud83d\\ude00 \\\\ud800"
    rows = [good, good, place % half]
    (tmp_path / name).write_text("\n".join(rows) if name.endswith("l") else f"[{','.join(rows)}]")
    loaded = load(tmp_path / name)
    assert "\U0001f600 \\ud800" in str({**loaded[1]}).replace("\\\\", "\\")
    with pytest.raises(DataError) as caught:
        loaded[2]
    assert f"{name}, row 3: {half[:6].lower()} is half of a character" in str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_json_that_is_nested_too_deep_is_named(name, tmp_path):
    (tmp_path / name).write_text('{"input": ' + "[" * 200_000 + "]" * 200_000 + "}")
    with pytest.raises(DataError, match=f"{name}.* is not JSON"):
        load(tmp_path / name)[0]


def test_a_broken_line_is_named_by_file_and_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"input": "a"}\n\n{"input": "b"\n')
    rows = load(file)
    assert rows[0]["input"] == "a"
    with pytest.raises(DataError, match="a.jsonl, row 3: the line is not JSON"):
        rows[1]


def test_a_line_that_is_no_object_is_named(tmp_path):
    with pytest.raises(DataError, match="row 2: expected an object, found list"):
        list(load(lines(tmp_path / "a.jsonl", [{"a": 1}, [1]])))


def test_a_broken_json_file_and_a_broken_parquet_file_are_named(tmp_path):
    (tmp_path / "a.json").write_text('[{"input": "a"},\n {"input": ]')
    with pytest.raises(DataError, match="a.json: the file is not JSON.*line 2"):
        load(tmp_path / "a.json")
    (tmp_path / "a.parquet").write_text("no parquet")
    with pytest.raises(DataError, match="a.parquet: the file cannot be read"):
        load(tmp_path / "a.parquet")


def test_rows_name_their_file_and_number_over_several_files(tmp_path):
    first = lines(tmp_path / "set" / "a.jsonl", ROWS[:1])
    second = lines(tmp_path / "set" / "b.jsonl", ROWS[1:])
    rows = load(tmp_path / "set")
    assert [rows.locate(index) for index in range(3)] == [(str(first), 1), (str(second), 1), (str(second), 2)]
    assert (rows[2]["__source__"], rows[2]["__row__"]) == (str(second), 2)


def test_byte_order_marks_and_windows_line_ends_do_no_harm(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"input": "a"}\r\n{"input": "b"}\r\n')
    assert inputs(load(tmp_path / "a.jsonl")) == ["a", "b"]


def test_rows_travel_to_another_process(tmp_path):
    rows = load(lines(tmp_path / "a.jsonl", ROWS))
    assert inputs(rows) == inputs(pickle.loads(pickle.dumps(rows)))


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_data_set_without_rows_is_an_error(content, tmp_path):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match="a.jsonl: the (file is empty|data set has no rows)"):
        load(tmp_path / "a.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no data files"):
        load(tmp_path / "empty")


@pytest.mark.parametrize("missing", ["gone.jsonl", "folder/sub/gone", "./gone", "a.jsonl@part"])
def test_a_path_that_is_not_there_is_an_error_at_once(missing, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(DataError, match="no such file or folder|no part 'part'"):
        load(missing)


def test_a_file_of_unknown_kind_is_an_error_that_lists_the_known_ones(tmp_path):
    (tmp_path / "a.xls").write_text("x")
    with pytest.raises(DataError, match="cannot read a .xls; data files are .jsonl"):
        load(tmp_path / "a.xls")


def test_a_mixture_loses_no_row_repeats_small_sets_and_follows_its_weights(tmp_path):
    big = lines(tmp_path / "big.jsonl", [{"input": f"b{n}"} for n in range(300)])
    small = lines(tmp_path / "small.jsonl", [{"input": f"s{n}"} for n in range(10)])
    mixed = inputs(load(f"{big},{small}", probs="3, 1", seed=5))
    counts = Counter(mixed)
    assert set(counts) == {f"b{n}" for n in range(300)} | {f"s{n}" for n in range(10)}
    assert set(counts[f"b{n}"] for n in range(300)) == {1}
    share = sum(name.startswith("s") for name in mixed) / len(mixed)
    assert 0.18 < share < 0.32
    assert mixed[-1] == "b299"
    assert mixed == inputs(load(f"{big},{small}", probs="0.75,0.25", seed=5))
    assert mixed != inputs(load(f"{big},{small}", probs="0.75,0.25", seed=6))


def test_a_mixture_long_enough_to_be_drawn_in_several_goes_is_whole(tmp_path):
    big = lines(tmp_path / "big.jsonl", [{"input": f"b{n}"} for n in range(2000)])
    small = lines(tmp_path / "small.jsonl", [{"input": f"s{n}"} for n in range(10)])
    mixed = inputs(load(f"{big},{small}", probs="0.1,0.9"))
    order = [name for name in mixed if name.startswith("b")]
    assert order == [f"b{n}" for n in range(2000)]
    turns = [name for name in mixed if name.startswith("s")]
    assert turns == [f"s{n % 10}" for n in range(len(turns))]


def test_max_samples_cuts_the_mixture_and_the_list(tmp_path):
    file = lines(tmp_path / "a.jsonl", ROWS)
    assert inputs(load(file, max_samples=2)) == ["question 0", "question 1"]
    assert len(load(f"{file},{file}", probs="1,1", max_samples=4)) == 4
    assert len(load(f"{file},{file}", max_samples=100)) == 6


@pytest.mark.parametrize("probs", ["0.5", "0.2,0.3,0.5", "0.5,x", "0,1", "-1,2"])
def test_weights_that_do_not_fit_the_list_are_refused(probs, tmp_path):
    file = lines(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ConfigError, match="dataset_probs"):
        load(f"{file},{file}", probs=probs)


def test_a_name_behind_the_hub_name_picks_a_config_a_split_or_a_folder(monkeypatch):
    """The hub is out of reach in tests, so its three calls are replaced; what is asked of them is what counts."""
    asked = []
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda name: ["main"])
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: ["train", "test"])

    def load_dataset(path, **chosen):
        asked.append((path, chosen))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for spec in ("org/name", "org/name@main", "org/name@test", "org/name@folder"):
        assert len(load(spec)) == 3
    assert asked == [
        ("org/name", {"split": "train"}),
        ("org/name", {"split": "train", "name": "main"}),
        ("org/name", {"split": "test"}),
        ("org/name", {"split": "train", "data_dir": "folder"}),
    ]


def test_a_hub_that_does_not_answer_is_an_error_with_the_name():
    with pytest.raises(DataError, match="org/no-such-set: there is no file or folder of that name here"):
        load("org/no-such-set")


def test_an_error_survives_the_way_to_another_process():
    error = DataError("bad", source="a.jsonl", row=3, columns=["x"])
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) == "a.jsonl, row 3: bad (columns: x)"
    assert (copy.source, copy.row, copy.columns) == ("a.jsonl", 3, ["x"])
