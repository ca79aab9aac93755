"""What a run directory is read through: nothing leads out of it, and a terminal is told text."""

import os
import sqlite3
import unicodedata
from contextlib import closing

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.config import read_yaml
from antiphon.core.errors import ConfigError, RecordError, printable
from antiphon.record import safe_ledger, schema
from antiphon.record.reader import RunReader
from antiphon.record.safe_files import (
    PARQUET_FLOOR,
    check_model_files,
    convert_read_errors,
    read_json,
    read_rows,
    read_table,
    resolve_file,
    resolve_path,
)
from tests.raising import raises_with


@given(st.text())
def test_printable_text_has_no_controls(text):
    shown = printable(text)
    assert not [each for each in shown if each != "\n" and unicodedata.category(each) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    shown.encode()
    if all(unicodedata.category(each)[0] in "LNPS" for each in text):
        assert shown == text


def test_escapes_name_their_characters():
    assert printable("a\x1b[31m\x9b\u202e\n") == "a\\u{1b}[31m\\u{9b}\\u{202e}\n"


@pytest.mark.parametrize(
    ("error", "reason"), [(ValueError("torn on\n page 7"), "torn on page 7"), (OSError(), "no reason")]
)
def test_a_file_that_cannot_be_read_is_named_with_the_reason(error, reason):
    said = f"{type(error).__name__}: {reason}"
    with raises_with(RecordError, match=said, path="rows.parquet"), convert_read_errors("rows.parquet"):
        raise error


@pytest.fixture
def run(tmp_path):
    run = tmp_path / "run"
    (run / "sub").mkdir(parents=True)
    (run / "file").write_text("here")
    (tmp_path / "outside").write_text("there")
    (run / "link_out").symlink_to(tmp_path / "outside")
    (run / "link_in").symlink_to(run / "file")
    (run / "folder_out").symlink_to(tmp_path)
    os.mkfifo(run / "pipe")
    return run


@pytest.mark.parametrize(
    "name",
    [
        "/dev/zero",
        "../outside",
        "sub/../../outside",
        "link_out",
        "folder_out/outside",
        "pipe",
        "sub",
        "none",
        "a\0b",
        "~",
    ],
)
def test_only_regular_files_inside_are_read(run, name):
    with pytest.raises(RecordError):
        resolve_file(run, name)


def test_files_of_a_run_are_found(run):
    assert resolve_file(run, "file").read_text() == resolve_file(run, "link_in").read_text() == "here"
    assert resolve_path(run, "sub/none") == run / "sub" / "none"


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("a: &a [1, 2]\nb: [*a, *a]\n", True),
        ("a: [" + ", ".join("1" * 40_000) + "]", True),
        ("a: [" + ", ".join("1" * 60_000) + "]", False),
        ("a: " + "[" * 50 + "]" * 50, True),
        ("a: " + "[" * 5_000 + "]" * 5_000, False),
        ("a: &a {b: *a}", False),
        ("a: " + "9" * 5_000, False),
        ("a: " + "x" * (1 << 20), False),
    ],
)
def test_yaml_is_bounded(tmp_path, text, valid):
    (tmp_path / "config.yaml").write_text(text)
    if valid:
        assert read_yaml(tmp_path / "config.yaml")["a"]
    else:
        with pytest.raises(ConfigError):
            read_yaml(tmp_path / "config.yaml")


def test_only_our_tables_are_opened(tmp_path):
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db:
        db.executescript(f"{schema.tables()} PRAGMA user_version = {schema.VERSION};")
        safe_ledger.open_ledger(tmp_path).close()
        db.execute("CREATE INDEX other ON attempts (score)")
    with raises_with(RecordError, match="'other'", path=tmp_path / "ledger.db"):
        safe_ledger.open_ledger(tmp_path)


def test_a_table_that_no_ledger_has_is_refused(tmp_path):
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db:
        db.executescript(f"{schema.tables()} CREATE TABLE more (a); PRAGMA user_version = {schema.VERSION};")
    with raises_with(RecordError, match="'more'", path=tmp_path / "ledger.db"):
        safe_ledger.open_ledger(tmp_path)


@pytest.mark.parametrize("checked", [True, False])
def test_a_reader_looks_at_all_pages_unless_it_is_told_not_to(tmp_path, checked):
    path = tmp_path / "ledger.db"
    with closing(sqlite3.connect(path)) as db:
        db.executescript(f"{schema.tables()} PRAGMA user_version = {schema.VERSION};")
        db.executemany(
            "INSERT INTO events (lineage, second, kind, detail) VALUES (0, 0.0, 'note', ?)", [("x" * 900,)] * 50
        )
        db.commit()
    content = bytearray(path.read_bytes())
    content[-4096:] = os.urandom(4096)  # a page of rows
    path.write_bytes(content)
    if checked:
        with raises_with(RecordError, path=path):
            RunReader.open(tmp_path)
    else:
        RunReader.open(tmp_path, check_pages=False).close()


def test_cost_of_queries_is_bounded(tmp_path):
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db:
        db.executescript(f"{schema.tables()} PRAGMA user_version = {schema.VERSION};")
    with closing(safe_ledger.open_ledger(tmp_path)) as db, pytest.raises(sqlite3.OperationalError, match="interrupted"):
        db.execute("WITH RECURSIVE e(n) AS (SELECT 1 UNION ALL SELECT n FROM e) SELECT count(*) FROM e").fetchone()


def test_json_is_read_up_to_a_size(run):
    (run / "a.json").write_text('{"a": [1]}')
    assert read_json(run, "a.json", most=10) == {"a": [1]}
    with raises_with(RecordError, match="10 bytes", path=run / "a.json"):
        read_json(run, "a.json", most=9)
    (run / "b.json").write_text("{")
    with raises_with(RecordError, path=run / "b.json"):
        read_json(run, "b.json")


@pytest.fixture
def model(tmp_path):
    model = tmp_path / "model"
    (model / "adapter").mkdir(parents=True)
    (tmp_path / "elsewhere").write_text("there")
    (model / "config.json").write_text("{}")
    return model


def test_a_table_that_decodes_to_more_than_it_states_is_not_read(tmp_path):
    """A dictionary holds a long text once, and each row of the file names it in a few bits."""
    rows = 2000
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["x" * 2_000_000]))
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"text": texts}), path, store_schema=False)
    with raises_with(RecordError, path=path):
        read_table(path, pa.schema([("text", pa.string())]))


def test_a_file_of_very_many_rows_is_not_read_even_for_one_of_them(tmp_path):
    """Each takes hardly anything, as they are all the same."""
    path, wanted = tmp_path / "t.parquet", pa.schema([("n", pa.int64())])
    for rows, fits in ((1000, True), (PARQUET_FLOOR // 8 * 2, False)):
        pq.write_table(pa.table({"n": pa.repeat(pa.scalar(7), rows)}), path)
        if fits:
            assert read_rows(path, wanted, 3, 1).to_pylist() == [{"n": 7}]
            continue
        with raises_with(RecordError, path=path):
            read_rows(path, wanted, 3, 1)


def test_a_model_directory_has_regular_files_alone(model):
    check_model_files(model)
    (model / "link").symlink_to(model.parent / "elsewhere")
    check_model_files(model, confined=False)
    with raises_with(RecordError, path=model / "link"):
        check_model_files(model)
    (model / "link").unlink()
    (model / "gone").symlink_to(model / "none")
    check_model_files(model, confined=False)
    (model / "gone").unlink()
    os.mkfifo(model / "pipe")
    for confined in (True, False):
        with raises_with(RecordError, path=model / "pipe"):
            check_model_files(model, confined=confined)


@pytest.mark.parametrize("names", ['{"a": "../elsewhere"}', '{"a": "none.safetensors"}', "3"])
def test_the_files_of_an_index_are_inside(model, names):
    index = model / "model.safetensors.index.json"
    (model / "1.safetensors").touch()
    index.write_text('{"weight_map": {"a": "1.safetensors"}}')
    check_model_files(model)
    index.write_text(f'{{"weight_map": {names}}}')
    check_model_files(model, confined=False)
    with pytest.raises(RecordError):
        check_model_files(model)
