"""Worker processes of a grading pool, as the pool sees them: their start, their socket and their end."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

import antiphon
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import ConfigError, WorkerDiedError
from antiphon.sandbox.base import Level
from antiphon.sandbox.isolation import levels
from antiphon.tasks.config import GradingConfig
from antiphon.tasks.grading.gpus import GpuAssigner
from antiphon.tasks.grading.worker import (
    HEADER,
    LONGEST_ANSWER,
    Answer,
    Failed,
    Graded,
    Ready,
    SetUp,
    decode_answer,
    frame_order,
)

START_SECONDS = 120.0  # a worker imports sympy or a user's package; on a loaded machine that takes a while

RewardSpecs = dict[str, tuple[str, Mapping[str, Any]]]  # task -> name and options of its reward

_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; {confinement}from antiphon.tasks.grading.worker import main; "
    "main({descriptor}, {cores}, {gpu!r})"
)
_CONFINE = (
    "from antiphon.sandbox.isolation.confinement import confine; "
    "confine({level}, {readable}, user_namespace={user_namespace}); "
)


@dataclass(slots=True, eq=False)
class Grading:
    """One call of `score` or `score_group` under way."""

    number: int
    task: str
    together: bool
    content: bytes
    verdict: asyncio.Future[Graded]
    deaths: int = 0


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """One worker process, and the gradings that it has not answered."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    gpu: str | None = None  # the one that it sees; None if it sees all
    batch: deque[Grading] = field(default_factory=deque)
    since: float = 0.0  # start of the first grading of the batch, seconds of the event loop's clock
    timer: asyncio.TimerHandle | None = None
    overdue: Grading | None = None  # the grading it was killed for
    extra: bool = False  # started beyond the workers that always run
    retired: bool = False  # it was ended because it was idle

    async def read(self) -> Answer | None:
        """Return the next answer; None if the process has closed its end, or has sent anything but an answer."""
        try:
            (length,) = HEADER.unpack(await self.reader.readexactly(HEADER.size))
            return decode_answer(await self.reader.readexactly(length)) if length <= LONGEST_ANSWER else None
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):
            return None

    def kill(self) -> None:
        """Kill the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class WorkerLauncher:
    """Starts and stops the worker processes of one pool."""

    def __init__(
        self,
        rewards: RewardSpecs,
        group_rewards: RewardSpecs,
        config: GradingConfig,
        deadlines: Deadlines,
        cores: Sequence[int],
        gpus: GpuAssigner | None,
    ) -> None:
        """Create a launcher of workers that build these rewards.

        Args:
            rewards: Reward of each task.
            group_rewards: Group reward of each task that has one.
            config: Settings of the pool.
            deadlines: Bounds the waits for a start.
            cores: Cores that workers run on; empty for all.
            gpus: Assigns one GPU to each worker; None if workers see all.
        """
        self._rewards, self._group_rewards = rewards, group_rewards
        self._config = config
        self._deadlines = deadlines
        self._cores = tuple(cores)
        self._gpus = gpus
        self._confinement = ""  # statements that a worker executes first

    async def confine(self) -> None:
        """Confine the workers that are started from now on."""
        self._confinement = await asyncio.to_thread(_confinement, self._config)

    async def spawn(self) -> WorkerProcess:
        """Start a process and tell it which rewards to build."""
        set_up = frame_order(SetUp(self._rewards, self._group_rewards, os.getpid()))
        gpu = self._gpus.acquire() if self._gpus else None
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-c",
                    _PROGRAM.format(
                        path=sys.path,
                        confinement=self._confinement,
                        descriptor=theirs.fileno(),
                        cores=self._cores,
                        gpu=gpu,
                    ),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is ours to handle; killing the group ends what a reward started
                )
            except BaseException:
                writer.close()
                self._release(gpu)
                raise
        writer.write(set_up)
        return WorkerProcess(process, reader, writer, gpu)

    async def wait_ready(self, worker: WorkerProcess) -> None:
        """Wait until a worker has built all rewards.

        Raises:
            ConfigError: A reward cannot be built.
            WorkerDiedError: The process ended before.
        """
        answer = await self._deadlines.wait(
            worker.read(), name="start", owner="the grading pool", on="a grading worker", deadline=START_SECONDS
        )
        if isinstance(answer, Failed):
            raise ConfigError(answer.message)
        if not isinstance(answer, Ready):
            code = await self._deadlines.wait(
                worker.process.wait(),
                name="end",
                owner="the grading pool",
                on="a grading worker",
                deadline=START_SECONDS,
            )
            raise WorkerDiedError(f"a grading worker ended with {describe_exit(code)} before it was ready")

    async def stop(self, worker: WorkerProcess) -> None:
        """Kill a worker with all that it started, release its GPU and wait for its end; it may have ended before."""
        worker.kill()
        worker.writer.close()
        self._release(worker.gpu)
        await worker.process.wait()

    def _release(self, gpu: str | None) -> None:
        if self._gpus is not None and gpu is not None:
            self._gpus.release(gpu)


def _confinement(config: GradingConfig) -> str:
    """Return the statements that confine a worker; none if the machine cannot and the configuration does not demand it."""
    if config.minimum_level == Level.LIMITS and (levels.probe().level or 0) < Level.CONFINED:
        return ""
    level = levels.require_level(config.minimum_level, "grading.minimum_level")
    readable = [*levels.python_sources(), str(Path(antiphon.__file__).parent)]
    readable += [path for path in sys.path if config.confine == "all" or path.endswith("-packages")]
    user_namespace = levels.probe().user_namespace
    return _CONFINE.format(level=int(level), readable=readable, user_namespace=user_namespace)


def describe_exit(code: int) -> str:
    """Describe a return code of a process: its signal or exit code."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"
