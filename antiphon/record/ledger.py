"""The ledger: the fate of every prompt, group, attempt and step of a run, in `ledger.db`, and their trajectories.

The scheduler reports events as they happen; each costs a row in memory. `commit` makes everything reported so far durable at
once: trajectories first, in a Parquet file of their own unless they are in one, then all rows in one transaction. Nothing is
trained on before it was committed. A crash therefore loses only the rows since the last commit, and the attempts that it
leaves live are marked lost by the next lineage.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from antiphon.core.types import AttemptId, AttemptStatus, Credit, GroupOutcome, PolicyVersion, Prompt, Trajectory
from antiphon.record import trajectories
from antiphon.record.events import Events
from antiphon.record.store import LedgerStore, PendingRows

INTERVAL = 5.0  # seconds between commits that nobody waits for

Caller = Callable[..., Awaitable[None]]


class Ledger:
    """Records what happens in one lineage of a run. Methods that add rows return at once; `commit` makes them durable."""

    def __init__(
        self, store: LedgerStore, events: Events, *, lineage: int = 0, step: int = 0, run: Caller | None = None
    ) -> None:
        """Record into a store.

        Args:
            store: The files that are written.
            events: Events that are recorded besides rows; rare ones also become rows.
            lineage: The lineage that is recorded.
            step: Number of the last step that is done.
            run: Calls the store; by default in a thread of its own.
        """
        self.lineage = lineage
        self.step = step
        self.events = events
        self.balance: Callable[[], Mapping[str, int]] = dict  # the scheduler's own counts
        self._store = store
        self._batch = PendingRows()
        self.sequence_number = 0  # of the last arrival, step or publication
        self._writing = asyncio.Lock()
        self._failed: Exception | None = None
        self._durable = 0  # sequence number up to which all is durable
        self._requested = asyncio.Event()  # somebody will soon want a commit
        self._committed = 0.0  # second
        self._thread = ThreadPoolExecutor(1, "ledger") if run is None else None
        self._run = run or self._in_thread
        events.on_rare = self.add_event

    # --- rows --------------------------------------------------------------------------------------------------------

    def add_group(self, group: int, prompt: Prompt, version: PolicyVersion) -> None:
        """Record that a group was admitted."""
        self._batch.groups.append((group, version.n, prompt.task, prompt.id, prompt.epoch))
        self.events.add("admit", group=group, prompt=prompt.id)

    def add_attempt(self, attempt: AttemptId, started: PolicyVersion) -> None:
        """Record that an attempt started."""
        self._batch.attempts.append((*attempt, started.n, self.events.now()))
        self._emit_status(attempt, AttemptStatus.RUNNING)

    def add_trajectory(self, trajectory: Trajectory) -> None:
        """Record the trajectory of an attempt that ran to its end, or failed."""
        self._batch.trajectories.append((self._next_number(), trajectory))
        if self.events.now() - self._committed > INTERVAL:
            self.request_commit()

    def add_reused_trajectory(self, trajectory: Trajectory, origin: str, file: str) -> None:
        """Record that an attempt reuses the trajectory of an attempt of an earlier lineage, which is in `file`."""
        self._batch.trajectories.append((self._next_number(), Trajectory(meta=trajectory.meta, payload=())))
        self._batch.reused.append((origin, file, trajectories.digest(trajectory), *trajectory.meta.id))

    def set_status(self, attempt: AttemptId, status: AttemptStatus) -> None:
        """Record a new status of an attempt: finished, or a terminal one."""
        step = self.step if status is AttemptStatus.TRAINED else None
        self._batch.statuses.append((status, step, *attempt))
        self._emit_status(attempt, status)

    def end_group(self, group: int, outcome: GroupOutcome) -> None:
        """Record the outcome of a group; the current step trained on a complete one."""
        step = self.step if outcome is GroupOutcome.COMPLETE else None
        self._batch.outcomes.append((outcome, step, group))

    def begin_step(self, groups: Sequence[int]) -> None:
        """Record that a step begins with these groups."""
        self.step += 1
        statement = "INSERT INTO steps (lineage, step, taken, took) VALUES (?, ?, ?, ?)"
        self._add_statement(statement, self.step, self.events.now(), self._next_number())
        self.events.add("take", groups=groups)

    def end_step(self, version: PolicyVersion) -> None:
        """Record that the current step is done and has published its version."""
        statement = "UPDATE steps SET version = ?3, published = ?4, released = ?5 WHERE lineage = ?1 AND step = ?2"
        self._add_statement(statement, self.step, version.n, self.events.now(), self._next_number())
        self.events.add("publish", version=version.n)

    def set_batch_digest(self, digest: str) -> None:
        """Record the digest of the current step's training batch."""
        self._add_statement("UPDATE steps SET batch = ?3 WHERE lineage = ?1 AND step = ?2", self.step, digest)

    def add_credit(self, credits: Sequence[Credit]) -> None:
        """Record what the current step made of the attempts that it trains on."""
        self._batch.credits += [(self.lineage, *credit.attempt, *credit[1:]) for credit in credits]

    def add_version(self, version: PolicyVersion, digest: int | None) -> None:
        """Record a version that engines get, with the digest of its weights."""
        self.events.add("update", version=version.n)
        self._add_statement("INSERT OR REPLACE INTO versions VALUES (?, ?, ?)", version.n, digest)

    def add_checkpoint(self, step: int, version: PolicyVersion, name: str) -> None:
        """Record that a checkpoint is complete."""
        self._add_statement("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)", step, version.n, name)

    def add_event(self, kind: str, detail: Mapping[str, Any]) -> None:
        """Record a rare event, such as a lost engine."""
        statement = "INSERT INTO events (lineage, second, kind, detail) VALUES (?, ?, ?, ?)"
        self._add_statement(statement, self.events.now(), kind, json.dumps(detail))

    def _next_number(self) -> int:
        self.sequence_number += 1
        return self.sequence_number

    def _add_statement(self, statement: str, *values: Any) -> None:
        self._batch.statements.append((statement, (self.lineage, *values)))

    def _emit_status(self, attempt: AttemptId, status: AttemptStatus) -> None:
        if self.events.enabled:
            self.events.add("attempt", attempt=str(attempt), status=status)

    # --- durability ---------------------------------------------------------------------------------------------

    async def commit(self) -> None:
        """Return when everything that was added until now is durable."""
        async with self._writing:
            await self._write()

    async def wait_durable(self, sequence_number: int) -> None:
        """Wait until all rows up to a sequence number are durable."""
        if self._durable < sequence_number:  # if they are, do not wait for a commit of later rows
            async with self._writing:
                if self._durable < sequence_number:
                    await self._write()

    def request_commit(self) -> None:
        """Ask `commit_on_request` to commit soon."""
        self._requested.set()

    async def commit_on_request(self) -> None:
        """Commit whenever `request_commit` was called; runs until it is cancelled.

        Rows that the next step will wait for are so written early, and a crash loses a few seconds of rows at most.
        """
        while True:
            await self._requested.wait()
            self._requested.clear()
            await self.commit()

    async def _write(self) -> None:
        """Write the pending rows. After a failure nothing more is written: later rows mean nothing without the lost ones."""
        if self._failed is not None:
            raise self._failed
        batch, self._batch, written = self._batch, PendingRows(), self.sequence_number
        batch.balance, self._committed = self.balance(), self.events.now()
        try:
            await self._run(self._store.write, self.lineage, batch)
        except Exception as error:
            self._failed = error
            raise
        self._durable = written

    async def close(self) -> None:
        """Commit, and let other processes write."""
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
            # What was handed to the thread is written all the same, and before anything later.
            await asyncio.wait([writing])
            writing.result()
            raise


async def run_synchronously(function: Callable[..., None], *args: Any) -> None:
    """Call the store at once, as virtual time needs."""
    function(*args)
