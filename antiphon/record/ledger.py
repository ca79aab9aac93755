"""The ledger: what became of every prompt, group, attempt and step of a run, in `ledger.db`; and their trajectories.

The scheduler says what happens, as it happens; that costs a line in memory. `commit` makes everything said so far durable
at once: trajectories first, in a Parquet file of their own unless they lie in one, then all rows in one transaction. What is
trained on was committed before. A crash so loses what was said since the last commit, and every attempt that it leaves alive is
called lost by the next life of the run.

One writer a run: a second one is refused as long as the first lives.
"""

import asyncio
import fcntl
import json
import sqlite3
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from antiphon.core.errors import RecordError
from antiphon.core.failpoints import hit
from antiphon.core.types import (
    AttemptId,
    AttemptStatus,
    GroupOutcome,
    PayloadReference,
    PolicyVersion,
    Prompt,
    Trajectory,
)
from antiphon.record import schema, trajectories
from antiphon.record.events import Events
from antiphon.record.run_dir import fsync, make_write_error

INTERVAL = 5.0  # seconds between commits that nobody waits for


@dataclass(slots=True)
class Batch:
    """What one commit writes."""

    groups: list[tuple[Any, ...]] = field(default_factory=list)
    started: list[tuple[Any, ...]] = field(default_factory=list)
    played: list[tuple[int, Trajectory]] = field(default_factory=list)  # with the order of their arrival
    taken_over: list[tuple[Any, ...]] = field(default_factory=list)
    ended: list[tuple[Any, ...]] = field(default_factory=list)
    outcomes: list[tuple[Any, ...]] = field(default_factory=list)
    others: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)  # statements
    balance: Mapping[str, int] = field(default_factory=dict)


class LedgerStore:
    """The files of a ledger, and the one who may write them."""

    def __init__(self, directory: Path) -> None:
        """Open, or make, the ledger of a run directory. `RecordError` if another process writes to it, or if it was written
        by a newer version."""
        self.rollouts = directory / "rollouts"
        self._lock = _locked(directory / "lock")
        try:
            self.rollouts.mkdir(exist_ok=True)
            self.connection = _opened(directory / "ledger.db")
        except BaseException:
            self._lock.close()
            raise
        self._files = 1 + max((int(file.stem) for file in self.rollouts.glob("[0-9]*.parquet")), default=-1)

    def write(self, lineage: int, batch: Batch) -> None:
        """Make a batch durable: all of it or nothing."""
        try:
            with self.connection as transaction:
                self._write(transaction, lineage, batch)
                hit("ledger.commit")
            hit("ledger.committed")
        except (OSError, sqlite3.Error) as error:
            raise make_write_error(self.rollouts.parent / "ledger.db", error) from error

    def _write(self, db: sqlite3.Connection, lineage: int, batch: Batch) -> None:
        many = db.executemany
        prompts = dict.fromkeys(row[2:5] for row in batch.groups)  # numbered as they were drawn
        many("INSERT OR IGNORE INTO prompts (task, id, epoch) VALUES (?, ?, ?)", list(prompts))
        many(
            "INSERT INTO groups (lineage, grp, version, prompt) SELECT ?, ?, ?, prompt FROM prompts"
            " WHERE task = ? AND id = ? AND epoch = ?",
            [(lineage, row[0], row[1], *row[2:5]) for row in batch.groups],
        )
        many(
            f"INSERT INTO attempts (lineage, grp, sibling, try, status, started, begun)"
            f" VALUES ({lineage}, ?, ?, ?, 'running', ?, ?)",
            batch.started,
        )
        many(
            "UPDATE attempts SET arrival = ?, newest = ?, score = ?, failure = ?, prompt_tokens = ?, tokens = ?, seconds = ?,"
            " file = ?, digest = ?"
            f" WHERE lineage = {lineage} AND grp = ? AND sibling = ? AND try = ?",
            self._played(lineage, batch.played),
        )
        here = f" WHERE lineage = {lineage} AND grp = ? AND sibling = ? AND try = ?"
        many("UPDATE attempts SET origin = ?, file = ?, digest = ?" + here, batch.taken_over)
        many("UPDATE attempts SET status = ?, step = ?" + here, batch.ended)
        many(f"UPDATE groups SET outcome = ?, step = ? WHERE lineage = {lineage} AND grp = ?", batch.outcomes)
        for statement, values in batch.others:
            db.execute(statement, values)
        many("INSERT OR REPLACE INTO balance VALUES (?, ?, ?)", [(lineage, *row) for row in batch.balance.items()])

    def _played(self, lineage: int, played: Sequence[tuple[int, Trajectory]]) -> list[tuple[Any, ...]]:
        """Write the trajectories that lie nowhere yet to a file, and return the rows that point to it."""
        kept = [each for _, each in played if each.payload and not isinstance(each.payload, PayloadReference)]
        name = f"{self._files:06d}.parquet"
        if kept:
            trajectories.write(self.rollouts / name, lineage, kept)
            hit("rollouts.write")
            fsync(self.rollouts / name)
            fsync(self.rollouts)
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
                _file(trajectory, name),
                trajectories.digest(trajectory) if trajectory.payload else None,
                *meta.id,
            )
            for arrival, trajectory in played
            for meta in (trajectory.meta,)
        ]

    def close(self) -> None:
        """Let others write."""
        self.connection.close()
        self._lock.close()


def _file(trajectory: Trajectory, name: str) -> str | None:
    """Where a trajectory lies; `name` if it was written just now."""
    if isinstance(trajectory.payload, PayloadReference):
        return trajectory.payload.file
    return name if trajectory.payload else None


Caller = Callable[..., Awaitable[None]]


class Ledger:
    """What the parts of a run tell; all but `commit` return at once. Steps count from the cut of the lineage."""

    def __init__(
        self, store: LedgerStore, events: Events, *, lineage: int = 0, step: int = 0, run: Caller | None = None
    ) -> None:
        """`run` calls the store, by default in a thread of its own; `step` is the last one that is done."""
        self.lineage = lineage
        self.step = step
        self.events = events
        self.balance: Callable[[], Mapping[str, int]] = dict  # what the scheduler has counted
        self._store = store
        self._batch = Batch()
        self.sequence_number = 0  # of arrivals, steps and publications: the place of the last in their order
        self._writing = asyncio.Lock()
        self._failed: Exception | None = None
        self._durable = 0  # of what was heard
        self._wanted = asyncio.Event()  # a commit that nobody waits for
        self._committed = 0.0  # second
        self._thread = ThreadPoolExecutor(1, "ledger") if run is None else None
        self._run = run or self._in_thread
        events.on_rare = self.add_event

    # --- what happens --------------------------------------------------------------------------------------------------

    def add_group(self, group: int, prompt: Prompt, version: PolicyVersion) -> None:
        """A group has a slot."""
        self._batch.groups.append((group, version.n, prompt.task, prompt.id, prompt.epoch))
        self.events.add("admit", group=group, prompt=prompt.id)

    def add_attempt(self, attempt: AttemptId, started: PolicyVersion) -> None:
        """An attempt runs."""
        self._batch.started.append((*attempt, started.n, self.events.now()))
        self._tell(attempt, AttemptStatus.RUNNING)

    def add_trajectory(self, trajectory: Trajectory) -> None:
        """An attempt ran to its end, whatever becomes of it."""
        self._batch.played.append((self._next(), trajectory))
        if self.events.now() - self._committed > INTERVAL:
            self.request_commit()

    def add_reused_trajectory(self, trajectory: Trajectory, origin: str, file: str) -> None:
        """An attempt has the trajectory of one of an earlier life, which lies in `file`."""
        self._batch.played.append((self._next(), Trajectory(meta=trajectory.meta, payload=())))
        self._batch.taken_over.append((origin, file, trajectories.digest(trajectory), *trajectory.meta.id))

    def set_status(self, attempt: AttemptId, status: AttemptStatus) -> None:
        """An attempt changes its state: it is finished, or has ended for good."""
        step = self.step if status is AttemptStatus.TRAINED else None
        self._batch.ended.append((status, step, *attempt))
        self._tell(attempt, status)

    def end_group(self, group: int, outcome: GroupOutcome) -> None:
        """A group has ended; if it is complete, the step in hand has taken it."""
        step = self.step if outcome is GroupOutcome.COMPLETE else None
        self._batch.outcomes.append((outcome, step, group))

    def begin_step(self, groups: Sequence[int]) -> None:
        """A step begins."""
        self.step += 1
        statement = "INSERT INTO steps (lineage, step, taken, took) VALUES (?, ?, ?, ?)"
        self._add(statement, self.step, self.events.now(), self._next())
        self.events.add("take", groups=groups)

    def end_step(self, version: PolicyVersion) -> None:
        """The step in hand is done, and its version is there."""
        statement = "UPDATE steps SET version = ?3, published = ?4, released = ?5 WHERE lineage = ?1 AND step = ?2"
        self._add(statement, self.step, version.n, self.events.now(), self._next())
        self.events.add("publish", version=version.n)

    def set_batch_digest(self, digest: str) -> None:
        """What the step in hand is trained on."""
        self._add("UPDATE steps SET batch = ?3 WHERE lineage = ?1 AND step = ?2", self.step, digest)

    def add_version(self, version: PolicyVersion, digest: int | None) -> None:
        """What the weights of a version are."""
        self._add("INSERT OR REPLACE INTO versions VALUES (?, ?, ?)", version.n, digest)

    def add_checkpoint(self, step: int, version: PolicyVersion, name: str) -> None:
        """A checkpoint is whole."""
        self._add("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)", step, version.n, name)

    def add_event(self, kind: str, detail: Mapping[str, Any]) -> None:
        """Something rare."""
        statement = "INSERT INTO events (lineage, second, kind, detail) VALUES (?, ?, ?, ?)"
        self._add(statement, self.events.now(), kind, json.dumps(detail))

    def _next(self) -> int:
        self.sequence_number += 1
        return self.sequence_number

    def _add(self, statement: str, *values: Any) -> None:
        self._batch.others.append((statement, (self.lineage, *values)))

    def _tell(self, attempt: AttemptId, status: AttemptStatus) -> None:
        if self.events.enabled:
            self.events.add("attempt", attempt=str(attempt), status=status)

    # --- making it durable ---------------------------------------------------------------------------------------------

    async def commit(self) -> None:
        """Return when everything said until now is durable."""
        async with self._writing:
            await self._write()

    async def wait_durable(self, heard: int) -> None:
        """Return when all that was `heard` until then is durable."""
        if self._durable < heard:  # else it waits for no commit of what came later
            async with self._writing:
                if self._durable < heard:
                    await self._write()

    def request_commit(self) -> None:
        """Commit soon: somebody will want it."""
        self._wanted.set()

    async def commit_on_request(self) -> None:
        """Commit what nobody waits for yet: what the next step will want, and every few seconds all else, so that a crash costs
        little. Runs until it is cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await self.commit()

    async def _write(self) -> None:
        """Write the batch. After one that failed no other is tried: what comes later means nothing without it."""
        if self._failed is not None:
            raise self._failed
        batch, self._batch, heard = self._batch, Batch(), self.sequence_number
        batch.balance, self._committed = self.balance(), self.events.now()
        try:
            await self._run(self._store.write, self.lineage, batch)
        except Exception as error:
            self._failed = error
            raise
        self._durable = heard

    async def close(self) -> None:
        """Commit, and let others write."""
        try:
            if self._failed is None:
                await self.commit()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._store.close()

    async def _in_thread(self, function: Callable[..., None], *args: Any) -> None:
        writing = asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            # What was handed over is written all the same, and before anything that comes later.
            await asyncio.wait([writing])
            writing.result()
            raise


async def run_synchronously(function: Callable[..., None], *args: Any) -> None:
    """What runs the store in virtual time."""
    function(*args)


def _locked(path: Path) -> IO[str]:
    try:
        file = path.open("a")
    except OSError as error:
        raise RecordError(f"nothing can be written to the run {path.parent}: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise RecordError(f"another process writes to the run {path.parent}; wait for it, or end it") from error
    return file


def _opened(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False)
    try:
        with closing(connection.execute("PRAGMA user_version")) as answer:
            (version,) = answer.fetchone()
        if version > schema.VERSION:
            raise RecordError(
                f"{path} has the schema {version}, and this Antiphon knows {schema.VERSION}: a newer one wrote it; use that"
            )
        connection.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL")
        if version == 0:
            connection.executescript(f"BEGIN; {schema.TABLES} PRAGMA user_version = {schema.VERSION}; COMMIT;")
    except sqlite3.OperationalError as error:
        connection.close()
        raise make_write_error(path, error) from error
    except sqlite3.DatabaseError as error:
        connection.close()
        raise RecordError(f"{path} is no ledger that can be read: {error}") from error
    except BaseException:
        connection.close()
        raise
    return connection
