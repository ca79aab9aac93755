"""The index database of one run: attempts copied from the ledger, texts, previews and spans of events."""

import hashlib
import os
import sqlite3
from pathlib import Path

FORMAT = 3  # of the index; one of another format is built anew
MOST_BYTES = 2 << 30  # of an index; texts beyond it are not indexed
TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE attempts (
    row INTEGER PRIMARY KEY,
    lineage INTEGER NOT NULL, grp INTEGER NOT NULL, sibling INTEGER NOT NULL, try INTEGER NOT NULL,
    task TEXT NOT NULL, prompt TEXT NOT NULL, epoch INTEGER NOT NULL,
    status TEXT NOT NULL, started INTEGER NOT NULL, step INTEGER, age INTEGER, score REAL,
    tokens INTEGER, prompt_tokens INTEGER, begun REAL NOT NULL, seconds REAL, failure TEXT, file TEXT, origin TEXT,
    UNIQUE (lineage, grp, sibling, try)
);
CREATE INDEX by_status_score ON attempts (status, score);
CREATE INDEX by_status_tokens ON attempts (status, tokens);
CREATE INDEX by_status_age ON attempts (status, age);
CREATE INDEX by_step ON attempts (step);
CREATE INDEX by_score ON attempts (score);
CREATE INDEX by_tokens ON attempts (tokens);
CREATE INDEX by_age ON attempts (age);
CREATE INDEX by_task ON attempts (task);
CREATE INDEX by_begin ON attempts (lineage, begun, seconds);
CREATE INDEX by_file ON attempts (file);
CREATE TABLE files (file TEXT PRIMARY KEY, texts INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE flags (flag TEXT NOT NULL, row INTEGER NOT NULL, PRIMARY KEY (flag, row)) WITHOUT ROWID;
CREATE TABLE previews (row INTEGER PRIMARY KEY, prompt TEXT NOT NULL, response TEXT NOT NULL);
CREATE VIRTUAL TABLE texts USING fts5 (text, content='', detail='full');
CREATE TABLE spans (
    number INTEGER PRIMARY KEY, lane TEXT NOT NULL, kind TEXT NOT NULL, label TEXT NOT NULL,
    start REAL NOT NULL, stop REAL NOT NULL
);
CREATE INDEX by_start ON spans (start, stop);
"""


def index_path(run: Path, cache: Path) -> Path:
    """Return the index file of a run."""
    name = hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:24]
    return cache / f"{name}.db"


def identify(run: Path) -> str:
    """Return what changes when another run takes the place of a run: an index of the old one is worth nothing."""
    parts = [str(FORMAT)]
    for name in ("ledger.db", "config.yaml"):
        path = run / name
        parts.append(str(path.stat().st_ino) if path.exists() else "")
    return " ".join(parts)


def open_index(path: Path, identity: str) -> sqlite3.Connection:
    """Open an index for writing; one of another run or format is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.exists():
        try:
            db = _connect(path)
            row = db.execute("SELECT value FROM meta WHERE key = 'identity'").fetchone()
            if row == (identity,):
                return db
            db.close()
        except sqlite3.DatabaseError:  # torn or foreign: it holds nothing that cannot be had again
            pass
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
    db = _connect(path)
    db.executescript(f"BEGIN; {TABLES} COMMIT;")
    db.execute("INSERT INTO meta VALUES ('identity', ?)", (identity,))
    db.commit()
    path.chmod(0o600)
    return db


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, check_same_thread=False, timeout=30, uri=True)
    db.executescript(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF; PRAGMA cache_size = -32000; PRAGMA temp_store = MEMORY;"
        " PRAGMA trusted_schema = OFF"
    )
    return db


def open_empty() -> sqlite3.Connection:
    """Open an index of nothing for queries."""
    db = sqlite3.connect(":memory:", check_same_thread=False)
    db.executescript(TABLES)
    db.row_factory = sqlite3.Row
    return db


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open an index for queries."""
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False, timeout=5)
    db.execute("PRAGMA cache_size = -16000")
    db.row_factory = sqlite3.Row
    return db
