"""The tables of `ledger.db`: all that the writer, and whoever checks it, share.

A *lineage* is one uninterrupted life of a run. A resume opens the next one at a *cut*: the step of the checkpoint it goes on
from. What its parent did after that step is undone, not forgotten. Numbers of groups, attempts, steps and versions are those
of a lineage; a step or version up to the cut belongs to the parent.

Every attempt ends in exactly one terminal state. In each lineage, at every commit: attempts = terminal + live.
"""

import sqlite3
from pathlib import Path

from antiphon.errors import RecordError

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


def open_to_read(directory: Path) -> sqlite3.Connection:
    """The ledger of a run directory, for whoever does not write; `RecordError` if it cannot be read."""
    path = directory / "ledger.db"
    if not path.is_file():
        raise RecordError(f"{path}: there is no ledger")
    try:
        try:
            return _opened(path, "mode=ro")
        except sqlite3.OperationalError:
            # SQLite wants to write beside the file. Where nobody can, nobody does: it may be read as it is.
            log = path.with_name(path.name + "-wal")
            if log.is_file() and log.stat().st_size:
                raise
            return _opened(path, "immutable=1")
    except sqlite3.DatabaseError as error:
        raise RecordError(f"{path} is no ledger that can be read: {error}") from error


def _opened(path: Path, how: str) -> sqlite3.Connection:
    db = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True)
    try:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except BaseException:
        db.close()
        raise
    if version != VERSION:
        db.close()
        raise RecordError(f"{path} has the schema {version}, and this Antiphon knows {VERSION}")
    return db
