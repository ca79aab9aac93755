"""Write the files of a ledger: all rows of a commit in one transaction, after the trajectories that they point to."""

import fcntl
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from antiphon.core.errors import RecordError
from antiphon.core.failpoints import hit
from antiphon.core.types import PayloadReference, Trajectory
from antiphon.record import image_files, schema, trajectories
from antiphon.record.run_dir import atomic_write, make_write_error


@dataclass(slots=True)
class PendingRows:
    """The rows that one commit writes."""

    groups: list[tuple[Any, ...]] = field(default_factory=list)
    attempts: list[tuple[Any, ...]] = field(default_factory=list)  # new ones
    trajectories: list[tuple[int, Trajectory]] = field(default_factory=list)  # with sequence numbers of their arrivals
    reused: list[tuple[Any, ...]] = field(default_factory=list)  # origins of trajectories of earlier lineages
    statuses: list[tuple[Any, ...]] = field(default_factory=list)
    outcomes: list[tuple[Any, ...]] = field(default_factory=list)
    credits: list[tuple[Any, ...]] = field(default_factory=list)
    statements: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)  # SQL and values
    balance: Mapping[str, int] = field(default_factory=dict)


class LedgerStore:
    """Writes the files of a ledger: `ledger.db` and the trajectories in `rollouts/`. One process a run may hold it."""

    def __init__(self, directory: Path) -> None:
        """Open the ledger of a run directory, or create it.

        Raises:
            RecordError: Another process holds it, a newer version of Antiphon wrote it, or it cannot be read or written.
        """
        self.directory = directory
        self.rollouts = directory / "rollouts"
        self._lock = _lock_file(directory / "lock")
        try:
            self.rollouts.mkdir(exist_ok=True)
            self.connection = _connect(directory / "ledger.db")
        except BaseException:
            self._lock.close()
            raise
        # A user may have put other files there, such as "000000 copy.parquet".
        numbers = (int(file.stem) for file in self.rollouts.glob("[0-9]*.parquet") if file.stem.isdecimal())
        self._files = 1 + max(numbers, default=-1)

    def write(self, lineage: int, batch: PendingRows) -> None:
        """Make a batch durable, all of it or nothing."""
        try:
            with self.connection as transaction:
                self._write(transaction, lineage, batch)
                hit("ledger.commit")
            hit("ledger.committed")
        except (OSError, sqlite3.Error) as error:
            raise make_write_error(self.directory / "ledger.db", error) from error

    def _write(self, db: sqlite3.Connection, lineage: int, batch: PendingRows) -> None:
        many = db.executemany
        attempt = f" WHERE lineage = {lineage} AND grp = ? AND sibling = ? AND try = ?"
        prompts = dict.fromkeys(row[2:5] for row in batch.groups)  # numbered in the order of their draw
        many("INSERT OR IGNORE INTO prompts (task, id, epoch) VALUES (?, ?, ?)", list(prompts))
        many(
            "INSERT INTO groups (lineage, grp, version, prompt) SELECT ?, ?, ?, prompt FROM prompts"
            " WHERE task = ? AND id = ? AND epoch = ?",
            [(lineage, row[0], row[1], *row[2:5]) for row in batch.groups],
        )
        many(
            "INSERT INTO attempts (lineage, grp, sibling, try, status, started, begun)"
            f" VALUES ({lineage}, ?, ?, ?, 'running', ?, ?)",
            batch.attempts,
        )
        many(
            "UPDATE attempts SET arrival = ?, newest = ?, score = ?, failure = ?, prompt_tokens = ?, tokens = ?, seconds = ?,"
            " file = ?, digest = ?" + attempt,
            self._write_trajectories(lineage, batch.trajectories),
        )
        many("UPDATE attempts SET origin = ?, file = ?, digest = ?" + attempt, batch.reused)
        many("UPDATE attempts SET status = ?, step = ?" + attempt, batch.statuses)
        many(f"UPDATE groups SET outcome = ?, step = ? WHERE lineage = {lineage} AND grp = ?", batch.outcomes)
        many("INSERT OR REPLACE INTO credit VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", batch.credits)
        for statement, values in batch.statements:
            db.execute(statement, values)
        many("INSERT OR REPLACE INTO balance VALUES (?, ?, ?)", [(lineage, *row) for row in batch.balance.items()])

    def _write_trajectories(self, lineage: int, arrived: Sequence[tuple[int, Trajectory]]) -> list[tuple[Any, ...]]:
        """Write trajectories that have no file yet to a new one; return the values of the rows that refer to them."""
        unwritten = [each for _, each in arrived if each.payload and not isinstance(each.payload, PayloadReference)]
        name = f"{self._files:06d}.parquet"
        if unwritten:
            image_files.write_images(self.rollouts, unwritten)
            with atomic_write(self.rollouts / name) as file:
                trajectories.write(file, lineage, unwritten)
                hit("rollouts.write")
            hit("rollouts.written")
            self._files += 1
        return [
            (
                arrival,
                meta.newest.n,
                meta.score.value,
                f"{meta.failure.source}: {meta.failure.message}" if meta.failure else None,
                meta.prompt_tokens,
                meta.completion_tokens,
                meta.timing.finished - meta.timing.queued,
                _find_file(trajectory, name),
                trajectories.digest(trajectory) if trajectory.payload else None,
                *meta.id,
            )
            for arrival, trajectory in arrived
            for meta in (trajectory.meta,)
        ]

    def close(self) -> None:
        """Close the ledger and let other processes open it."""
        self.connection.close()
        self._lock.close()


def _find_file(trajectory: Trajectory, name: str) -> str | None:
    """Return the file that holds a trajectory: `name` if it was written just now."""
    if isinstance(trajectory.payload, PayloadReference):
        return trajectory.payload.file
    return name if trajectory.payload else None


def require_no_writer(directory: Path) -> None:
    """Raise `RecordError` if another process writes to the run in a directory."""
    lock = directory / "lock"
    if lock.exists():
        _lock_file(lock).close()


def _lock_file(path: Path) -> IO[str]:
    try:
        file = path.open("a")
    except OSError as error:
        message = f"the run {path.parent} cannot be written to: {error.strerror}"
        raise RecordError(message, path=path.parent) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        message = f"another process writes to the run {path.parent}; wait for it, or end it"
        raise RecordError(message, path=path.parent) from error
    return file


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False)
    try:
        with closing(connection.execute("PRAGMA user_version")) as answer:
            (version,) = answer.fetchone()
        schema.check_version(path, version)
        connection.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL")
        if version < schema.VERSION:
            has_tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
            tables = schema.CREDIT_TABLE if has_tables else schema.tables()
            connection.executescript(f"BEGIN; {tables} PRAGMA user_version = {schema.VERSION}; COMMIT;")
    except sqlite3.OperationalError as error:
        connection.close()
        raise make_write_error(path, error) from error
    except sqlite3.DatabaseError as error:
        connection.close()
        raise RecordError(f"{path} is no ledger that can be read: {error}", path=path) from error
    except BaseException:
        connection.close()
        raise
    return connection
