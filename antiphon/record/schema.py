"""The tables of `ledger.db`: all that the writer, and whoever checks it, share.

A *lineage* is one uninterrupted life of a run. A resume opens the next one at a *cut*: the step of the checkpoint it goes on
from. What its parent did after that step is undone, not forgotten. Numbers of groups, attempts, steps and versions are those
of a lineage; a step or version up to the cut belongs to the parent.

Every attempt ends in exactly one terminal state. In each lineage, at every commit: attempts = terminal + live.
"""

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from antiphon.core.errors import RecordError
from antiphon.record import reading

VERSION = 1  # of the schema, kept as SQLite's user_version

TERMINAL = ("trained", "filtered", "stale", "redundant", "cancelled", "failed", "lost")
LIVE = ("running", "finished")

TABLES = """
CREATE TABLE lineages (
    lineage INTEGER PRIMARY KEY,
    parent INTEGER,            -- NULL: the first
    cut INTEGER NOT NULL,      -- step of the parent that it goes on from
    version INTEGER NOT NULL,  -- number of the version of then
    code TEXT NOT NULL,        -- what wrote it
    state TEXT                 -- JSON: what the scheduler and the prompts were at the cut; NULL: at their beginning
) STRICT;
CREATE TABLE prompts (
    prompt INTEGER PRIMARY KEY, -- in the order in which they were drawn first, which is that of every life
    task TEXT NOT NULL,
    id TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    UNIQUE (task, id, epoch)
) STRICT;
CREATE TABLE groups (
    lineage INTEGER NOT NULL,
    grp INTEGER NOT NULL,
    prompt INTEGER NOT NULL REFERENCES prompts,
    version INTEGER NOT NULL,  -- at which it was admitted
    outcome TEXT,              -- NULL while it lives
    step INTEGER,              -- that took it
    PRIMARY KEY (lineage, grp)
) STRICT, WITHOUT ROWID;
CREATE TABLE attempts (
    lineage INTEGER NOT NULL,
    grp INTEGER NOT NULL,
    sibling INTEGER NOT NULL,
    try INTEGER NOT NULL,
    status TEXT NOT NULL,
    started INTEGER NOT NULL,  -- version
    begun REAL NOT NULL,       -- second of the lineage's clock
    newest INTEGER,            -- version that made its newest token
    step INTEGER,              -- that trained on it
    score REAL,
    failure TEXT,
    prompt_tokens INTEGER,
    tokens INTEGER,            -- sampled
    seconds REAL,              -- from its start to its score
    arrival INTEGER,           -- its place in the order of what the scheduler heard
    file TEXT,                 -- in rollouts/, with its trajectory
    digest INTEGER,            -- of the trajectory's tokens, log-probs, versions and mask
    origin TEXT,               -- lineage:group.sibling.try that made the trajectory, when it was taken over
    PRIMARY KEY (lineage, grp, sibling, try)
) STRICT, WITHOUT ROWID;
CREATE TABLE steps (
    lineage INTEGER NOT NULL,
    step INTEGER NOT NULL,
    version INTEGER,           -- that it published; NULL until then
    batch TEXT,                -- digest of what was trained on
    taken REAL NOT NULL,       -- second of the lineage's clock
    published REAL,
    took INTEGER NOT NULL,     -- its place in the order of arrivals
    released INTEGER,          -- that of its publication
    undone INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (lineage, step)
) STRICT, WITHOUT ROWID;
CREATE TABLE versions (
    lineage INTEGER NOT NULL,
    version INTEGER NOT NULL,
    digest INTEGER,            -- of the weights as engines got them
    PRIMARY KEY (lineage, version)
) STRICT, WITHOUT ROWID;
CREATE TABLE checkpoints (
    lineage INTEGER NOT NULL,
    step INTEGER NOT NULL,
    version INTEGER NOT NULL,
    name TEXT NOT NULL,        -- directory in checkpoints/
    PRIMARY KEY (lineage, step)
) STRICT, WITHOUT ROWID;
CREATE TABLE events (
    number INTEGER PRIMARY KEY,
    lineage INTEGER NOT NULL,
    second REAL NOT NULL,
    kind TEXT NOT NULL,
    detail TEXT NOT NULL       -- JSON
) STRICT;
CREATE TABLE balance (         -- as the scheduler has it, written in the transaction of what it counts
    lineage INTEGER NOT NULL,
    status TEXT NOT NULL,      -- a terminal one, or 'dispatched'
    attempts INTEGER NOT NULL,
    PRIMARY KEY (lineage, status)
) STRICT, WITHOUT ROWID;
"""


MOST_BYTES = 64 << 30  # of a ledger
MOST_VALUE = 256 << 20  # bytes of one value in it
EVERY = 100_000  # instructions of SQLite's machine between two looks at how many there were
FLOOR, FOR_EACH_BYTE = (
    100_000_000,
    200,
)  # instructions that reading a ledger may take: so many, and so many for each byte


def open_ledger(directory: Path) -> sqlite3.Connection:
    """Return the ledger of a run directory, for those who do not write.

    `RecordError` if it is missing or damaged, or if anything in it is not one of our tables: a view of the same name could
    compute what it likes. What queries may cost is bounded by the size of the file; `sqlite3.OperationalError` beyond.
    """
    path = directory / "ledger.db"
    if not path.exists():
        raise RecordError(f"{path}: there is no ledger")
    size = sum(reading.resolve_file(directory, path.name + suffix).stat().st_size for suffix in ("", *_beside(path)))
    if size > MOST_BYTES:
        raise RecordError(f"{path} has {size:,} bytes; at most {MOST_BYTES:,} are read")
    try:
        try:
            return _opened(path, "mode=ro", size)
        except sqlite3.OperationalError:
            # SQLite wants to write beside the file. Where nobody can, nobody does: it may be read as it is.
            log = path.with_name(path.name + "-wal")
            if log.is_file() and log.stat().st_size:
                raise
            return _opened(path, "immutable=1", size)
    except (sqlite3.DatabaseError, UnicodeError) as error:
        raise RecordError(f"{path} is no ledger that can be read: {error}") from error


def _beside(path: Path) -> list[str]:
    """Return the endings of the files that SQLite opens together with the ledger."""
    return [suffix for suffix in ("-wal", "-shm", "-journal") if os.path.lexists(f"{path}{suffix}")]


def _opened(path: Path, how: str, size: int) -> sqlite3.Connection:
    db = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True)
    try:
        _bound(db, FLOOR + FOR_EACH_BYTE * size)
        (version,) = db.execute("PRAGMA user_version").fetchone()
        found = _objects(db)
        if version != VERSION:
            raise RecordError(f"{path} has the schema {version}, and this Antiphon knows {VERSION}")
        _check_objects(path, found)
        (answer,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if answer != "ok":
            raise RecordError(f"{path} is damaged: {' '.join(answer.split())}")
    except BaseException:
        db.close()
        raise
    return db


def _bound(db: sqlite3.Connection, most: int) -> None:
    """Limit what a database can make its reader do: by its schema, by the length of a value, and by instructions in all."""
    for name, value in (("trusted_schema", "OFF"), ("cell_size_check", "ON"), ("mmap_size", "0")):
        db.execute(f"PRAGMA {name} = {value}")
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_VALUE)
    left = most

    def count() -> bool:
        nonlocal left
        left -= EVERY
        return left < 0  # true interrupts the query

    db.set_progress_handler(count, EVERY)


Objects = dict[
    str, tuple[str, bool, tuple[tuple[Any, ...], ...]]
]  # by name: its kind, whether it is strict, its columns


def _objects(db: sqlite3.Connection) -> Objects:
    """Return all that the schema of a database has, but for what SQLite keeps for itself."""
    kinds = {}
    for kind, name, page in db.execute("SELECT type, name, rootpage FROM main.sqlite_schema"):
        if not ((kind == "index" and name.startswith("sqlite_autoindex_")) or name == "sqlite_stat1"):
            kinds[name] = "virtual table" if kind == "table" and not page else kind
    if set(kinds.values()) - {"table"}:  # to ask for the columns of others would begin to compute them
        return {name: (kind, False, ()) for name, kind in kinds.items()}
    strict = {row[1]: bool(row[5]) for row in db.execute("PRAGMA main.table_list")}
    columns = 'SELECT name, type, "notnull", pk, hidden FROM pragma_table_xinfo(?)'
    return {name: (kind, strict[name], tuple(db.execute(columns, (name,)))) for name, kind in kinds.items()}


def _check_objects(path: Path, found: Objects) -> None:
    """Raise `RecordError` unless a ledger has our tables, and nothing else."""
    with closing(sqlite3.connect(":memory:")) as ours:
        ours.executescript(TABLES)
        wanted = _objects(ours)
    for name, (kind, *_) in found.items():
        if kind != "table" or name not in wanted:
            raise RecordError(f"{path}: {name!r} is a {kind} that no ledger has; it is not read")
    for name in wanted:
        if found.get(name) != wanted[name]:
            has = "has other columns than ours" if name in found else "is missing"
            raise RecordError(f"{path}: the table {name!r} {has}; it is not read")
