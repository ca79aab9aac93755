"""Open a ledger that somebody else may have made, or that is damaged, for reading only."""

import os
import sqlite3
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any

from antiphon.core.errors import RecordError
from antiphon.record import safe_files, schema

MOST_BYTES = 64 << 30  # size of a ledger
MOST_VALUE = 256 << 20  # bytes of one value
CHECK_INTERVAL = 100_000  # SQLite instructions between two checks of the budget
# Budget of SQLite instructions for reading a ledger: a constant, and a number for each byte of the file.
BASE_INSTRUCTIONS = 100_000_000
INSTRUCTIONS_PER_BYTE = 200

# Tables and other objects by name: kind, whether the table is strict, columns.
Objects = dict[str, tuple[str, bool, tuple[tuple[Any, ...], ...]]]


def open_ledger(directory: Path, *, check_pages: bool = True) -> sqlite3.Connection:
    """Open the ledger of a run directory for reading.

    The cost of queries is bounded by the size of the file; beyond that they raise `sqlite3.OperationalError`.

    Args:
        directory: The run directory.
        check_pages: Read the whole file once and check its structure. A program that opens the same ledger again and again
            does so the first time only.

    Raises:
        RecordError: The ledger is missing or damaged, has an unknown schema version, or holds anything but our tables:
            a view with the name of a table could compute what it likes.
    """
    path = directory / "ledger.db"
    if not path.exists():
        raise RecordError(f"{path}: there is no ledger", path=path)
    size = sum(
        safe_files.resolve_file(directory, path.name + suffix).stat().st_size
        for suffix in ("", *_find_companions(path))
    )
    if size > MOST_BYTES:
        raise RecordError(f"{path} has {size:,} bytes; at most {MOST_BYTES:,} are read", path=path)
    try:
        if not os.path.lexists(
            f"{path}-wal"
        ):  # nobody writes: SQLite need not leave files of its own beside the ledger
            return _connect(path, "immutable=1", size, check_pages)
        try:
            return _connect(path, "mode=ro", size, check_pages)
        except sqlite3.OperationalError:
            # SQLite wants to write beside the file. In a read-only directory nobody else writes either, so that the file may
            # be read as it is.
            log = path.with_name(path.name + "-wal")
            if log.is_file() and log.stat().st_size:
                raise
            return _connect(path, "immutable=1", size, check_pages)
    except (sqlite3.DatabaseError, UnicodeError) as error:
        raise RecordError(f"{path} is no ledger that can be read: {error}", path=path) from error


def _find_companions(path: Path) -> list[str]:
    """Return the suffixes of the files that SQLite opens together with the ledger."""
    return [suffix for suffix in ("-wal", "-shm", "-journal") if os.path.lexists(f"{path}{suffix}")]


def _connect(path: Path, mode: str, size: int, check_pages: bool) -> sqlite3.Connection:
    db = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True)
    try:
        _limit_cost(db, BASE_INSTRUCTIONS + INSTRUCTIONS_PER_BYTE * size)
        (version,) = db.execute("PRAGMA user_version").fetchone()
        found = _list_objects(db)
        schema.check_version(path, version)
        _check_objects(path, found, version)
        (answer,) = db.execute("PRAGMA quick_check(1)").fetchone() if check_pages else ("ok",)
        if answer != "ok":
            raise RecordError(f"{path} is damaged: {' '.join(answer.split())}", path=path)
    except BaseException:
        db.close()
        raise
    return db


def _limit_cost(db: sqlite3.Connection, most: int) -> None:
    """Limit what a database can make its reader do: through its schema, the length of a value, and instructions in all."""
    for name, value in (("trusted_schema", "OFF"), ("cell_size_check", "ON"), ("mmap_size", "0")):
        db.execute(f"PRAGMA {name} = {value}")
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_VALUE)
    left = most

    def is_exhausted() -> bool:
        nonlocal left
        left -= CHECK_INTERVAL
        return left < 0  # True interrupts the query

    db.set_progress_handler(is_exhausted, CHECK_INTERVAL)


def _list_objects(db: sqlite3.Connection) -> Objects:
    """Return all objects in the schema of a database, except those that SQLite keeps for itself."""
    kinds = {}
    for kind, name, page in db.execute("SELECT type, name, rootpage FROM main.sqlite_schema"):
        if not ((kind == "index" and name.startswith("sqlite_autoindex_")) or name == "sqlite_stat1"):
            kinds[name] = "virtual table" if kind == "table" and not page else kind
    if set(kinds.values()) - {"table"}:  # asking for the columns of other objects would begin to compute them
        return {name: (kind, False, ()) for name, kind in kinds.items()}
    strict = {row[1]: bool(row[5]) for row in db.execute("PRAGMA main.table_list")}
    query = (
        'SELECT tables.name, columns.name, columns.type, "notnull", pk, hidden'
        " FROM main.sqlite_schema AS tables JOIN pragma_table_xinfo(tables.name) AS columns ORDER BY cid"
    )
    columns: dict[str, list[tuple[Any, ...]]] = {name: [] for name in kinds}
    for table, *column in db.execute(query):
        if table in columns:
            columns[table].append(tuple(column))
    return {name: (kind, strict[name], tuple(columns[name])) for name, kind in kinds.items()}


@lru_cache
def _list_wanted(version: int) -> Objects:
    """Return the objects of a ledger with a schema version."""
    with closing(sqlite3.connect(":memory:")) as ours:
        ours.executescript(schema.tables(version))
        return _list_objects(ours)


def _check_objects(path: Path, found: Objects, version: int) -> None:
    """Raise `RecordError` unless a ledger has exactly our tables."""
    wanted = _list_wanted(version)
    for name, (kind, *_) in found.items():
        if kind != "table" or name not in wanted:
            raise RecordError(f"{path}: {name!r} is a {kind} that no ledger has; it is not read", path=path)
    for name in wanted:
        if found.get(name) != wanted[name]:
            problem = "has other columns than ours" if name in found else "is missing"
            raise RecordError(f"{path}: the table {name!r} {problem}; it is not read", path=path)
