"""A run directory that is damaged, or made to do harm: verbs that read it end, with one line, and read nothing else.

Each verb is a process of its own with a hard limit.
"""

import json
import os
import re
import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import warm

pytestmark = pytest.mark.system

SECONDS = 120  # each verb takes a few
SECRET = "the-secret-of-another-file"


@pytest.fixture
def run(trained, tmp_path):
    ignored = shutil.ignore_patterns("*-wal", "*-shm")
    return shutil.copytree(trained.folder / "runs" / "run", tmp_path / "elsewhere" / "run", ignore=ignored)


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET)
    return path


def called(verb, run, trained):
    """The arguments of a verb that reads a run, with the code that the run names."""
    more = {
        "why": ["0.0.0"],
        "diff": [trained.folder / "runs" / "run"],
        "replay": ["--code", trained.folder],
        "regrade": ["--code", trained.folder],
        "export": [run.parent / "exported"],
        "serve": ["port=0"],
    }
    return [verb, run, *more.get(verb, ())]


SLOW = ("replay", "regrade")  # to start; without --long only some of the damages are shown to them
SHOWN = (
    "half_of_it",
    "an_endless_view",
    "columns_of_any_type",
    "a_pipe",
    "a_half",
    "repeated_gigabytes",
    "a_named_pipe",
)


@pytest.fixture
def verbs_for(request):
    """The verbs that a damage is shown to, of those that read what is damaged."""

    def chosen(damage, *verbs):
        every = damage in SHOWN or request.config.getoption("--long")
        return [verb for verb in verbs if every or verb not in SLOW]

    return chosen


def read_all(verbs, run, trained):
    """Run the verbs side by side; each is ended after the limit, and the test with it."""
    wide = {**os.environ, "COLUMNS": "300"}
    processes = {verb: warm.start("-m", "antiphon", *called(verb, run, trained), environment=wide) for verb in verbs}
    found = {}
    try:
        for verb, process in processes.items():
            out, err = process.communicate(timeout=SECONDS)
            found[verb] = (process.returncode, out, err)
    finally:
        for process in processes.values():
            process.kill()
    return found


def check_errors(found, names=""):
    """One line, which names the file; what an audit, or a replay, finds is a result, and stands on the standard output."""
    for verb, (code, out, err) in found.items():
        said = f"{verb}: {code}\n{out}\n{err}"
        assert code in (1, 2) and "Traceback" not in out + err and SECRET not in out + err, said
        assert len(err.splitlines()) == (1 if code == 2 else 0), said
        if code == 2:
            assert err.startswith("antiphon: "), said
        assert names in (err if code == 2 else out), said


# --- ledgers -------------------------------------------------------------------------------------------------------------

LEDGERS = {}  # by what is wrong: what makes it so, of the path of the ledger


def ledger(function):
    LEDGERS[function.__name__] = function
    return function


def execute(path, script):
    with closing(sqlite3.connect(path)) as db:
        db.executescript("PRAGMA journal_mode = DELETE;" + script)


@ledger
def nothing_in_it(path):
    path.write_bytes(b"")


@ledger
def a_text(path):
    path.write_text("this is no database\n" * 500)


@ledger
def half_of_it(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@ledger
def its_header_alone(path):
    path.write_bytes(path.read_bytes()[:100])


@ledger
def noise_after_its_header(path):
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:100] + np.random.default_rng(0).bytes(size - 100))


@ledger
def pages_of_zeros(path):
    content = bytearray(path.read_bytes())
    content[8192 : len(content) // 2] = bytes(len(content) // 2 - 8192)
    path.write_bytes(content)


@ledger
def bits_flipped_in_every_page(path):
    content = bytearray(path.read_bytes())
    for start in range(4096, len(content), 4096):
        content[start : start + 12] = bytes(byte ^ 0x5A for byte in content[start : start + 12])
    path.write_bytes(content)


@ledger
def a_table_less(path):
    execute(path, "DROP TABLE steps")


@ledger
def a_column_less(path):
    execute(path, "ALTER TABLE attempts DROP COLUMN file")


@ledger
def another_schema(path):
    execute(path, "PRAGMA user_version = 9")


ENDLESS = "WITH RECURSIVE endless(n) AS (SELECT 1 UNION ALL SELECT n FROM endless) SELECT n AS lineage, n AS grp,"
ENDLESS += " 'trained' AS status, 1 AS sibling, 1 AS try, 1 AS step FROM endless"


@ledger
def an_endless_view(path):
    execute(path, f"DROP TABLE attempts; CREATE VIEW attempts AS {ENDLESS}")


@ledger
def a_view_beside_its_tables(path):
    execute(path, f"CREATE VIEW more AS {ENDLESS}")


@ledger
def a_trigger(path):
    execute(path, "CREATE TRIGGER t AFTER INSERT ON events BEGIN DELETE FROM attempts; END")


@ledger
def a_virtual_table(path):
    execute(path, "DROP TABLE attempts; CREATE VIRTUAL TABLE attempts USING fts4(lineage, grp, status)")


@ledger
def a_generated_column(path):
    execute(path, "ALTER TABLE attempts ADD COLUMN more TEXT AS (hex(zeroblob(100000000)))")


@ledger
def columns_of_any_type(path):
    execute(
        path,
        "CREATE TABLE loose AS SELECT * FROM attempts; DROP TABLE attempts; ALTER TABLE loose RENAME TO attempts;"
        " UPDATE attempts SET lineage = 'first', tokens = x'00', score = 'high'",
    )


@ledger
def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


@ledger
def a_pipe_as_its_log(path):
    os.mkfifo(f"{path}-wal")


@ledger
def a_link_out_of_the_run(path):
    path.rename(path.parent.parent / "ledger.db")
    path.symlink_to(path.parent.parent / "ledger.db")


@ledger
def a_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", LEDGERS)
def test_a_damaged_ledger_is_one_line(trained, run, verbs_for, damage):
    LEDGERS[damage](run / "ledger.db")
    found = read_all(verbs_for(damage, "audit", "why", "diff", "replay", "regrade"), run, trained)
    check_errors(found, "ledger.db")
    assert {code for code, *_ in found.values()} == {2}


ROWS = {  # what its rows say, and the verbs that come to it
    "UPDATE lineages SET state = '{'": ("replay",),
    "UPDATE attempts SET origin = 'nowhere', arrival = NULL": ("why",),
    "UPDATE attempts SET failure = NULL, file = NULL": ("replay",),
    "UPDATE prompts SET task = CAST(x'ff00fe' AS TEXT)": ("why", "regrade"),
    "DELETE FROM lineages": ("diff", "replay"),
    "UPDATE attempts SET file = '{secret}'": ("audit", "why", "replay", "regrade"),
    "UPDATE attempts SET file = '../../secret'": ("audit", "why", "replay", "regrade"),
    "UPDATE attempts SET file = '/dev/zero'": ("audit", "why", "replay", "regrade"),
    "UPDATE attempts SET file = 'a' || char(0) || 'b'": ("audit", "why", "replay", "regrade"),
}


@pytest.mark.parametrize("rows", ROWS)
def test_rows_that_mean_nothing_are_one_line(trained, run, secret, rows):
    execute(run / "ledger.db", rows.replace("{secret}", str(secret)))
    check_errors(read_all(ROWS[rows], run, trained))


# --- trajectories --------------------------------------------------------------------------------------------------------

FILES = {}  # by what is wrong: what makes it so, of the path of each Parquet file


def parquet(function):
    FILES[function.__name__] = function
    return function


def rewrite(path, name, column):
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, column(table)), path)


@parquet
def an_empty_file(path):
    path.write_bytes(b"")


@parquet
def a_text_file(path):
    path.write_text("PAR1 this is none PAR1")


@parquet
def a_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@parquet
def no_footer(path):
    path.write_bytes(path.read_bytes()[:-8] + b"\xff\xff\xff\x7fPAR1")


@parquet
def noise_in_its_footer(path):
    content = bytearray(path.read_bytes())
    content[-300:-12] = np.random.default_rng(1).bytes(288)
    path.write_bytes(content)


@parquet
def noise_in_its_pages(path):
    content = bytearray(path.read_bytes())
    for start in range(20, len(content) // 2, 64):
        content[start : start + 16] = np.random.default_rng(2).bytes(16)
    path.write_bytes(content)


@parquet
def a_missing_column(path):
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["loss_mask"]), path)


@parquet
def masks_that_are_texts(path):
    rewrite(path, "loss_mask", lambda table: pa.array(["mask"] * len(table)))


@parquet
def masks_that_are_null(path):
    rewrite(path, "loss_mask", lambda table: pa.array([None] * len(table), pa.list_(pa.bool_())))


@parquet
def repeated_gigabytes(path):
    """Masks of 150 million flags in a few kilobytes."""
    one = pa.array([[True] * 100_000], pa.list_(pa.bool_()))
    table = pq.read_table(path).slice(0, 1)
    masks = pa.chunked_array([one] * 1500)
    place = table.schema.get_field_index("loss_mask")
    pq.write_table(pa.concat_tables([table] * 1500).set_column(place, "loss_mask", masks), path, compression="zstd")


@parquet
def a_named_pipe(path):
    path.unlink()
    os.mkfifo(path)


@parquet
def a_link_elsewhere(path):
    aside = path.parent.parent.parent / path.name
    path.rename(aside)
    path.symlink_to(aside)


@parquet
def a_device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("damage", FILES)
def test_a_damaged_parquet_file_is_one_line(trained, run, verbs_for, damage):
    files = sorted((run / "rollouts").iterdir())
    for file in files[:1] if damage == "repeated_gigabytes" else files:
        FILES[damage](file)
    check_errors(read_all(verbs_for(damage, "audit", "why", "replay", "regrade"), run, trained), "rollouts/0")


CONTENT = {  # columns that only a program reads, which an audit leaves alone
    "meta that is no JSON": ("meta", lambda _: "{"),
    "meta without an attempt": ("meta", lambda _: "{}"),
    "meta of a list": ("meta", lambda _: "[1]"),
    "meta that is nested deeply": ("meta", lambda _: "[" * 100_000 + "]" * 100_000),
    "meta that is null": ("meta", lambda _: None),
    "turns that are none": ("turns", lambda _: '[{"start": "a"}]'),
    "streams of objects": ("streams", lambda _: [{"name": "s", "dtype": "O", "shape": [2], "data": b"x" * 16}]),
    "streams of no shape": ("streams", lambda _: [{"name": "s", "dtype": "f4", "shape": [-5, 0], "data": b"x"}]),
}


@pytest.mark.parametrize("damage", CONTENT)
def test_content_that_is_none_is_one_line(trained, run, verbs_for, damage):
    column, value = CONTENT[damage]
    for file in (run / "rollouts").iterdir():
        rewrite(
            file,
            column,
            lambda table: pa.array([value(row) for row in table.column(column)], table.schema.field(column).type),
        )
    check_errors(read_all(verbs_for(damage, "why", "replay", "regrade"), run, trained), "rollouts/0")


# --- configurations and manifests ----------------------------------------------------------------------------------------

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
CONFIGS = {
    "aliases": lambda path: path.write_text(path.read_text() + BOMB),
    "nesting": lambda path: path.write_text("a: " + "[" * 20_000),
    "itself": lambda path: path.write_text(path.read_text() + "b: &b [*b]\n"),
    "size": lambda path: path.write_text(path.read_text() + "# nothing\n" * 300_000),
    "a list": lambda path: path.write_text("[1, 2]"),
    "objects": lambda path: path.write_text("rollout: !!python/object/apply:os.system ['true']"),
    "a set": lambda path: path.write_text("rollout: !!set {a, b}"),
    "a number": lambda path: path.write_text(
        re.sub(r"async_ratio: .*", "async_ratio: '1e999999999'", path.read_text())
    ),
    "bytes": lambda path: path.write_bytes(b"rollout: \xff\xfe\x00"),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", CONFIGS)
def test_a_damaged_configuration_is_one_line(trained, run, verbs_for, damage):
    CONFIGS[damage](run / "config.yaml")
    verbs = ["audit", "replay", "regrade", *(["serve"] if damage == "aliases" else [])]
    verbs += ["diff"] if damage not in ("a set", "a number") else []  # which differ from what they were, and no more
    found = read_all(verbs_for(damage, *verbs), run, trained)
    check_errors(found, "config.yaml")
    assert {code for code, *_ in found.values()} == {2}


def listed(name):
    def change(checkpoint, secret):
        manifest = json.loads((checkpoint / "MANIFEST.json").read_text())
        manifest["files"] = {name.replace("{secret}", str(secret)): {"bytes": len(SECRET), "digest": "0"}}
        (checkpoint / "MANIFEST.json").write_text(json.dumps(manifest))

    return change


def replaced(name, how):
    def change(checkpoint, secret):
        (checkpoint / name).unlink()
        how(checkpoint / name, secret)

    return change


MANIFESTS = {
    "a device": listed("/dev/zero"),
    "a file outside": listed("{secret}"),
    "a file above": listed("../../../../secret"),
    "a file that is a pipe": replaced("config.json", lambda path, _: os.mkfifo(path)),
    "a file that is a link": replaced("config.json", lambda path, secret: path.symlink_to(secret)),
    "a manifest that is a pipe": replaced("MANIFEST.json", lambda path, _: os.mkfifo(path)),
    "a manifest that is a device": replaced("MANIFEST.json", lambda path, _: path.symlink_to("/dev/zero")),
    "nesting": lambda checkpoint, _: (checkpoint / "MANIFEST.json").write_text("[" * 1_000_000),
    "a list": lambda checkpoint, _: (checkpoint / "MANIFEST.json").write_text("[1]"),
    "no numbers": lambda checkpoint, _: (checkpoint / "MANIFEST.json").write_text('{"files": {"a": 1}, "digest": 2}'),
}


@pytest.mark.parametrize("damage", MANIFESTS)
def test_a_damaged_manifest_is_one_line(trained, run, secret, damage):
    for checkpoint in (run / "checkpoints").iterdir():
        MANIFESTS[damage](checkpoint, secret)
    found = read_all(("audit", "export", *(("serve",) if damage == "a device" else ())), run, trained)
    check_errors(found, "checkpoints")
    assert all(code == (1 if verb == "audit" else 2) for verb, (code, *_) in found.items())


def test_checkpoints_elsewhere_are_not_read(trained, run):
    (run / "checkpoints").rename(run.parent / "others")
    (run / "checkpoints").symlink_to(run.parent / "others")
    check_errors(read_all(("audit", "export", "serve"), run, trained), "checkpoints")


# --- what reaches the terminal -------------------------------------------------------------------------------------------

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\u202eevil\u2066[red]x[/red]\x08\r"
FORBIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def test_text_of_a_run_reaches_no_terminal_raw(trained, run):
    def of_meta(table):
        metas = [json.loads(text) for text in table.column("meta").to_pylist()]
        for meta in metas:
            meta["score"]["detail"] = HOSTILE
        return pa.array([json.dumps(meta) for meta in metas])

    for file in (run / "rollouts").iterdir():
        rewrite(file, "meta", of_meta)
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        db.execute("UPDATE prompts SET id = ? || id", (HOSTILE,))
        db.execute("UPDATE attempts SET failure = ?", (HOSTILE,))
        db.execute("UPDATE attempts SET status = ? WHERE sibling = 0 AND grp > 0", (HOSTILE,))
        db.execute("UPDATE lineages SET code = ?", (HOSTILE,))
        db.commit()
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("mytask:problems", "mytask:problems" + json.dumps(HOSTILE)[1:-1]))
    for verb, (_, out, err) in read_all(("audit", "why", "diff", "replay", "regrade"), run, trained).items():
        assert not FORBIDDEN.search(out + err), (verb, out, err)
        assert "Traceback" not in err, err
        if verb in ("audit", "why"):
            assert "evil" in out and "[red]" in out, out
