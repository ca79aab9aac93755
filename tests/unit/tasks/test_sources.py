"""Files of every format give the rows that other libraries have written into them."""

import csv
import json

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.errors import ConfigError, DataError
from antiphon.tasks import sources
from tests.raising import raises_with

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00\r"), max_size=20)
ROWS = st.lists(st.fixed_dictionaries({"prompt": TEXTS, "answer": TEXTS, "": TEXTS}), min_size=1, max_size=8)


def write_csv(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_arrow_file(path, rows):
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table, 3)


def write_arrow_stream(path, rows):
    table = pa.Table.from_pylist(rows)
    with path.open("wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, 3)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


WRITERS = {
    "csv": (sources.csv, write_csv),
    "arrow": (sources.arrow, write_arrow_file),
    "stream": (sources.arrow, write_arrow_stream),
    "parquet": (sources.parquet, lambda path, rows: pa.parquet.write_table(pa.Table.from_pylist(rows), path)),
    "jsonl": (sources.jsonl, write_jsonl),
}


@pytest.mark.parametrize("kind", WRITERS)
@settings(deadline=None)
@given(rows=ROWS)
def test_the_same_rows_come_from_every_format(kind, rows, tmp_path_factory):
    read, write = WRITERS[kind]
    path = tmp_path_factory.mktemp("data") / "rows"
    write(path, rows)
    assert list(read("train", str(path))) == rows


def test_a_directory_has_files_of_each_split(tmp_path):
    for name in ("train-00000", "train-00001", "test"):
        write_csv(tmp_path / f"{name}.csv", [{"prompt": name}])
        (tmp_path / f"{name}.txt").write_text(f"{name}\n\n {name}\n")
        write_arrow_stream(tmp_path / f"{name}.arrow", [{"prompt": name}])
    for read in (sources.csv, sources.arrow):
        assert [row["prompt"] for row in read("train", str(tmp_path))] == ["train-00000", "train-00001"]
    assert [row["prompt"] for row in sources.text("test", str(tmp_path))] == ["test", " test"]


def test_csv_of_spreadsheets_is_read(tmp_path):
    """With a mark at the beginning, lines that end as on Windows, and semicolons."""
    (tmp_path / "a.csv").write_bytes('\ufeffprompt;answer\r\n"one; ""two""\r\nmore";007\r\n'.encode())
    assert list(sources.csv("train", str(tmp_path / "a.csv"), delimiter=";")) == [
        {"prompt": 'one; "two"\r\nmore', "answer": "007"}
    ]


@pytest.mark.parametrize(
    ("read", "content", "place"),
    [
        (sources.csv, b"prompt,answer\na,b\nc\n", ":3"),
        (sources.csv, b"prompt,answer\na,b,c\n", ":2"),
        (sources.csv, b'prompt\n"a"b\n', ":2"),
        (sources.csv, b"prompt\na\n\xff\n", None),
        (sources.text, b"a\n\xff\n", ""),
        (sources.arrow, b"no arrow", ""),
        (sources.arrow, b"", ""),
        (sources.parquet, b"no parquet", ""),
    ],
)
def test_files_that_are_none_are_named(tmp_path, read, content, place):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(DataError) as raised:
        list(read("train", str(path)))
    assert str(raised.value.path).startswith(str(path))
    if place is not None:
        assert raised.value.path == f"{path}{place}"


def test_a_file_has_no_splits(tmp_path):
    for name, split in (("all.jsonl", "train"), ("my_test.jsonl", "test"), ("test-0001.jsonl", "test")):
        (tmp_path / name).write_text('{"prompt": "a"}\n')
        assert list(sources.jsonl(split, str(tmp_path / name))) == [{"prompt": "a"}]
    for name in ("all.jsonl", "latest.jsonl", "tests.jsonl"):
        (tmp_path / name).write_text('{"prompt": "a"}\n')
        with raises_with(ConfigError, key="split", value="test"):
            list(sources.jsonl("test", str(tmp_path / name)))


def test_a_file_that_is_missing_is_named(tmp_path):
    for read, suffix in ((sources.csv, ".csv"), (sources.arrow, ".arrow"), (sources.text, ".txt")):
        with raises_with(DataError, path=str(tmp_path / f"train{suffix}")):
            list(read("train", str(tmp_path)))


def test_numbered_prompts_have_no_text():
    assert list(sources.numbered("test", size=2, start=5)) == [
        {"id": "test-5", "prompt": "", "index": 5},
        {"id": "test-6", "prompt": "", "index": 6},
    ]
