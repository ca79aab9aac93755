"""The sandboxes of a service: creation, states, expiry.

    pending -> running -> stopped -> deleted
      |  ^                 ^   |
      |  +-- restart ----- | --+
      +-- no start, stop --+

A running sandbox stops when a client says so, when it has been idle for too long, or when its backend ends by itself. This
module knows nothing of HTTP. A request that cannot be fulfilled raises `RefusedError` with the reason.
"""

import asyncio
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import StallError
from antiphon.sandbox.service.commits import Commits
from antiphon.sandbox.service.config import ServiceConfig
from antiphon.sandbox.service.http_errors import Reason, RefusedError
from antiphon.sandbox.service.metrics import Metrics
from antiphon.sandbox.service.quotas import check_sandboxes, make_backend_config
from antiphon.sandbox.service.records import Sandbox, SandboxRequest, State
from antiphon.sandbox.service.warm_pool import BACKEND_ERRORS, WarmPool
from antiphon.sandbox.sessions.config import ShellSandboxConfig
from antiphon.sandbox.sessions.files import SandboxFiles
from antiphon.sandbox.sessions.runtime_dirs import RuntimeDirs
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox

T = TypeVar("T")

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
START_WAIT_SECONDS = 1.0  # that a start request waits, so that most clients need not ask again
SWEEP_SECONDS = 1.0  # between two checks for idle sandboxes
MAX_ENDED = 1000  # ended sandboxes that can still be asked about, beside those whose files are kept


class Sandboxes:
    """All sandboxes of a service. Use it as `async with`; leaving the block ends everything."""

    def __init__(self, config: ServiceConfig, metrics: Metrics) -> None:
        """Start nothing yet."""
        self.config = config
        self.metrics = metrics
        self._all: dict[str, Sandbox] = {}
        self._commits = Commits(config.commit_directory, config.commits)
        self._deadlines = Deadlines()
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        """Start one sandbox of each image as a trial: where that is impossible, the service does not start."""
        self._runtime_dirs = RuntimeDirs()
        self._pool = WarmPool(
            make_backend_config(self.config, SandboxRequest()),
            self.config.warm,
            runtime_dirs=self._runtime_dirs,
            deadlines=self._deadlines,
            metrics=self.metrics,
            tasks=self._tasks,
        )
        try:
            await self._pool.add_one()
            for image in self.config.images[1:]:
                await self._pool.try_one(make_backend_config(self.config, SandboxRequest(image=image)))
            await self._tasks.__aenter__()
        except BaseException:
            await self._pool.close()
            self._runtime_dirs.close()
            raise
        self._sweeper = self._tasks.create_task(self._sweep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.config = self.config.model_copy(update={"stopped_minutes": 0.0})
        self._pool.size = 0
        self._sweeper.cancel()
        try:
            await asyncio.gather(*(self._end(sandbox, "shutdown") for sandbox in self.all()))
            await self._tasks.__aexit__(kind, error, trace)
        finally:
            await self._pool.close()
            self._runtime_dirs.close()

    def get(self, sandbox_id: str) -> Sandbox:
        """Return a sandbox, whatever its state."""
        if sandbox_id not in self._all:
            raise RefusedError(Reason.UNKNOWN, f"there is no sandbox {sandbox_id!r}")
        return self._all[sandbox_id]

    def all(self) -> list[Sandbox]:
        """Return all known sandboxes, oldest first."""
        return list(self._all.values())

    def now(self) -> float:
        """Return the time in seconds, by the clock of `Sandbox.used`."""
        return asyncio.get_running_loop().time()

    def idle_seconds_left(self, sandbox: Sandbox) -> float:
        """Return the seconds until a sandbox is stopped if no request comes."""
        limit = self.config.idle_minutes * 60
        if sandbox.request.idle_seconds is not None:
            limit = min(limit, sandbox.request.idle_seconds)
        return sandbox.used + limit - self.now()

    def gauges(self) -> dict[str, dict[str, float]]:
        """Return the current counts, as `Metrics.text` takes them."""
        states = Counter(sandbox.state for sandbox in self.all())
        live = self._live()
        return {
            "antiphon_sandboxes": {state.value: states[state] for state in State},
            "antiphon_sandboxes_warm": {"": len(self._pool)},
            "antiphon_sandbox_sessions": {"": sum(len(sandbox.sessions) for sandbox in live)},
            "antiphon_sandbox_memory_bytes": {"": sum(sandbox.backend_config.limits.memory for sandbox in live)},
        }

    def _live(self) -> list[Sandbox]:
        return [sandbox for sandbox in self.all() if sandbox.live]

    def _check_quota(self, wanted: ShellSandboxConfig) -> None:
        live = [sandbox.backend_config.limits.memory for sandbox in self._live()]
        check_sandboxes(self.config.sandboxes, self.config.memory, live, wanted.limits.memory)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def start(self, request: SandboxRequest, wait_seconds: float = START_WAIT_SECONDS) -> Sandbox:
        """Create a sandbox. It may still be pending after `wait_seconds`."""
        sandbox_id = secrets.token_hex(16) if request.sandbox_id is None else request.sandbox_id
        if not ID.fullmatch(sandbox_id):
            raise RefusedError(Reason.INPUT, f"sandbox_id: {sandbox_id!r} must match {ID.pattern}")
        if sandbox_id in self._all and self._all[sandbox_id].state is not State.DELETED:
            raise RefusedError(Reason.STATE, f"sandbox {sandbox_id!r} exists already")
        commit = self._commits.find(request.image)
        config = make_backend_config(self.config, replace(request, image=commit.image or None) if commit else request)
        self._check_quota(config)
        self._all.pop(sandbox_id, None)  # a deleted sandbox of this name, so that the new one is listed last
        sandbox = Sandbox(id=sandbox_id, request=request, backend_config=config, commit=commit)
        self._all[sandbox_id] = sandbox
        self._begin_start(sandbox, "start")
        await self._wait_for_start(sandbox, wait_seconds)
        return sandbox

    async def commit(self, sandbox_id: str, tag: str) -> None:
        """Keep the work directory of a running sandbox as an image of this name, beside what runs in it."""
        sandbox = self.get(sandbox_id)
        if tag in self.config.images:
            raise RefusedError(
                Reason.INPUT, f"image_tag: {tag[:200]!r} is an image of this service; choose another name"
            )
        async with sandbox.lock:
            if sandbox.state is not State.RUNNING or sandbox.files is None:
                raise RefusedError(Reason.STATE, f"sandbox {sandbox_id!r} is {sandbox.state}; commit it while it runs")
            began = time.time()
            try:
                await self._commits.save(tag, sandbox.backend_config.image, sandbox.files)
            except BACKEND_ERRORS as error:
                if isinstance(error, RefusedError):
                    raise
                raise RefusedError(Reason.FAILED, f"commit: {str(error).splitlines()[0]}") from error
            sandbox.committed, sandbox.used = (tag, began, time.time()), self.now()

    async def stop(self, sandbox_id: str) -> None:
        """End what runs in a sandbox. Its work directory is kept for a while, for `restart`."""
        sandbox = self.get(sandbox_id)
        async with sandbox.lock:
            if sandbox.live:
                await self._end(sandbox, "stop")

    async def delete(self, sandbox_id: str) -> None:
        """Remove the files of a stopped sandbox."""
        sandbox = self.get(sandbox_id)
        async with sandbox.lock:
            if sandbox.live:
                raise RefusedError(Reason.STATE, f"sandbox {sandbox_id!r} is {sandbox.state}; stop it first")
            self._delete(sandbox, "delete")

    async def restart(self, sandbox_id: str, wait_seconds: float = START_WAIT_SECONDS) -> Sandbox:
        """Start a stopped sandbox again, with its work directory as it was."""
        sandbox = self.get(sandbox_id)
        async with sandbox.lock:
            if sandbox.state is not State.STOPPED:
                raise RefusedError(
                    Reason.STATE, f"sandbox {sandbox_id!r} is {sandbox.state}; only a stopped one can restart"
                )
            if sandbox.snapshot is None:
                raise RefusedError(Reason.STATE, f"sandbox {sandbox_id!r} cannot restart: its files are lost")
            self._check_quota(sandbox.backend_config)
            self._begin_start(sandbox, "restart")
        await self._wait_for_start(sandbox, wait_seconds)
        return sandbox

    # --- starting ----------------------------------------------------------------------------------------------------

    def _begin_start(self, sandbox: Sandbox, event: str) -> None:
        sandbox.enter(State.PENDING, event)
        sandbox.failure = ""
        sandbox.starting = self._tasks.create_task(self._start(sandbox))

    async def _wait_for_start(self, sandbox: Sandbox, seconds: float) -> None:
        """Wait until the sandbox has started or failed to start, or `seconds` have passed."""
        if sandbox.starting is not None:
            with suppress(StallError):
                await self._wait(asyncio.wait([sandbox.starting]), sandbox, "start", seconds)

    async def _start(self, sandbox: Sandbox) -> None:
        began = self.now()
        seconds = min(sandbox.request.start_seconds or self.config.start_seconds, self.config.start_seconds)
        try:
            backend = await self._wait(self._provision(sandbox), sandbox, "start", seconds)
        except BACKEND_ERRORS as error:
            self.metrics.count("antiphon_sandbox_start_failures")
            sandbox.failure = f"it did not start: {str(error).splitlines()[0]}"
            sandbox.enter(State.STOPPED, "start failed")
            await self._close(sandbox)
        else:
            self.metrics.count("antiphon_sandbox_starts")
            self.metrics.observe("antiphon_sandbox_start_seconds", self.now() - began)
            sandbox.used = self.now()
            sandbox.enter(State.RUNNING, "alive")
            backend.ended.add_done_callback(lambda _: self._on_backend_lost(sandbox, backend))
        finally:
            if sandbox.starting is asyncio.current_task():  # not a restart that began while this one was closed
                sandbox.starting = None

    async def _provision(self, sandbox: Sandbox) -> ShellSandbox:
        """Give a sandbox a backend and, on restart, its files."""
        sandbox.backend = backend = await self._pool.take(sandbox.backend_config)
        sandbox.files = SandboxFiles(backend)
        if sandbox.snapshot is not None:
            await sandbox.files.restore(sandbox.snapshot)
            _drop_snapshot(sandbox)
        elif sandbox.commit is not None:
            sandbox.commit = await self._commits.restore(sandbox.commit.tag, sandbox.files)
        return backend

    # --- ending ------------------------------------------------------------------------------------------------------

    async def _end(self, sandbox: Sandbox, event: str) -> None:
        """Stop a sandbox, and keep its work directory if it is to be kept."""
        if sandbox.starting is not None:
            sandbox.starting.cancel()
            await asyncio.wait([sandbox.starting])
        files = sandbox.files if sandbox.state is State.RUNNING and self._keep_seconds(sandbox) else None
        if sandbox.live:
            sandbox.enter(State.STOPPED, event)
        try:
            if files is not None and sandbox.backend is not None:
                await sandbox.backend.end_processes()  # so that nothing changes the files or delays their reader
                path = self._runtime_dirs.path / f"{sandbox.id}.snapshot"
                await files.snapshot(path)
                sandbox.snapshot = path
        except BACKEND_ERRORS as error:
            sandbox.failure = f"its files are lost: {str(error).splitlines()[0]}"
        finally:
            await self._close(sandbox)
        self._forget_old()

    async def _close(self, sandbox: Sandbox) -> None:
        for session in (*sandbox.sessions.values(), *sandbox.spare):
            session.close()
        sandbox.sessions.clear()
        sandbox.terminals.clear()
        sandbox.spare.clear()
        if sandbox.files is not None:
            sandbox.files.close()
            sandbox.files = None
        if sandbox.backend is not None:
            backend, sandbox.backend = sandbox.backend, None
            await self._pool.close_backend(backend)

    def _on_backend_lost(self, sandbox: Sandbox, backend: ShellSandbox) -> None:
        """Handle the end of a backend. If the service did not end it, the sandbox is lost."""
        if sandbox.backend is backend and sandbox.state is State.RUNNING:
            self.metrics.count("antiphon_sandbox_losses")
            sandbox.failure = "it ended by itself, or was killed; its files are lost"
            sandbox.enter(State.STOPPED, "lost")
            self._tasks.create_task(self._close(sandbox))

    def _delete(self, sandbox: Sandbox, event: str) -> None:
        if sandbox.state is not State.DELETED:
            _drop_snapshot(sandbox)
            sandbox.enter(State.DELETED, event)

    def _forget_old(self) -> None:
        """Forget sandboxes so that the list stays bounded: deleted ones first, never one whose files are still to be kept."""
        ended = [sandbox for sandbox in self.all() if not sandbox.live and sandbox.backend is None]
        old = [sandbox for sandbox in ended if sandbox.snapshot is None or self._is_kept_long_enough(sandbox)]
        old.sort(key=lambda sandbox: (sandbox.state is not State.DELETED, sandbox.history[-1].at))
        for sandbox in old[: max(0, len(ended) - MAX_ENDED)]:
            self._delete(sandbox, "forgotten")
            del self._all[sandbox.id]

    def _is_kept_long_enough(self, sandbox: Sandbox) -> bool:
        stopped = sandbox.since(State.STOPPED) if sandbox.state is State.STOPPED else None
        return stopped is not None and time.time() - stopped > self._keep_seconds(sandbox)

    def _keep_seconds(self, sandbox: Sandbox) -> float:
        limit = self.config.stopped_minutes * 60
        return limit if sandbox.request.keep_seconds is None else min(limit, sandbox.request.keep_seconds)

    async def _sweep(self) -> None:
        """Stop idle sandboxes, delete old stopped ones and maintain the warm pool, until cancelled."""
        while True:
            self._pool.maintain()
            for sandbox in self.all():
                if sandbox.lock.locked():
                    continue
                if self._is_idle_too_long(sandbox):
                    self._tasks.create_task(self._stop_idle(sandbox))
                if self._is_kept_long_enough(sandbox):
                    self._delete(sandbox, "kept long enough")
            await asyncio.sleep(SWEEP_SECONDS)

    def _is_idle_too_long(self, sandbox: Sandbox) -> bool:
        return sandbox.state is State.RUNNING and not sandbox.busy and self.idle_seconds_left(sandbox) < 0

    async def _stop_idle(self, sandbox: Sandbox) -> None:
        async with sandbox.lock:
            if self._is_idle_too_long(sandbox):
                await self._end(sandbox, "idle")

    async def _wait(self, awaitable: Awaitable[T], sandbox: Sandbox, name: str, seconds: float) -> T:
        on = f"sandbox {sandbox.id}"
        return await self._deadlines.wait(awaitable, name=name, owner="the service", on=on, deadline=seconds)


def _drop_snapshot(sandbox: Sandbox) -> None:
    if sandbox.snapshot is not None:
        sandbox.snapshot.unlink(missing_ok=True)
        sandbox.snapshot = None
