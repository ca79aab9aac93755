"""Worker processes of a grading pool, as the pool sees them: their start, their socket and their end."""

import asyncio
import os
import pickle
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
from antiphon.core.objects import pack_objects
from antiphon.core.processes.child import Child, describe_exit, start_python
from antiphon.core.processes.framing import FrameConnection
from antiphon.sandbox.base import Level
from antiphon.sandbox.isolation import levels
from antiphon.tasks.config import GradingConfig
from antiphon.tasks.grading.gpus import GpuAssigner
from antiphon.tasks.grading.worker import (
    LONGEST_ANSWER,
    Answer,
    Failed,
    Graded,
    Ready,
    SetUp,
    decode_answer,
)

START_SECONDS = 120.0  # a worker imports sympy or a user's package; on a loaded machine that takes a while

RewardSpecs = Mapping[str, tuple[str, Mapping[str, Any]]]  # task -> name and options of its reward

_CONFINE = (
    "from antiphon.sandbox.isolation.confinement import confine; "
    "confine({level}, {readable}, user_namespace={user_namespace}); "
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Settings of the grading processes of one pool.

    Attributes:
        rewards: Reward of each task.
        group_rewards: Group reward of each task that has one.
        config: Number of processes, deadline of a grading and confinement.
        confined: Processes can use Python and nothing else of their machine.
    """

    rewards: RewardSpecs
    group_rewards: RewardSpecs = field(default_factory=dict)
    config: GradingConfig
    confined: bool = False


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

    name: str  # as records of verdicts have it
    child: Child
    connection: FrameConnection
    received: asyncio.Queue[bytes | None]  # frames; None at the end
    gpu: str | None = None  # the one that it sees; None if it sees all
    batch: deque[Grading] = field(default_factory=deque)
    since: float = 0.0  # start of the first grading of the batch, seconds of the event loop's clock
    timer: asyncio.TimerHandle | None = None
    overdue: Grading | None = None  # the grading it was killed for
    extra: bool = False  # started beyond the workers that always run
    retired: bool = False  # it was ended because it was idle
    profile: asyncio.Future[str] | None = None  # that it was asked for; empty if it ends before it has written any

    async def read(self) -> Answer | None:
        """Return the next answer; None if the process has closed its end, or has sent anything but an answer."""
        content = await self.received.get()
        try:
            return None if content is None else decode_answer(content)
        except msgspec.DecodeError:
            return None

    def send(self, order: Any) -> None:
        """Send the process an order."""
        self.connection.send(pickle.dumps(order, pickle.HIGHEST_PROTOCOL))

    def kill(self) -> None:
        """Kill the process and all that it started."""
        self.child.kill()


class WorkerLauncher:
    """Starts and stops the worker processes of one pool."""

    def __init__(
        self,
        settings: PoolSettings,
        deadlines: Deadlines,
        cores: Sequence[int],
        gpus: GpuAssigner | None,
    ) -> None:
        """Create a launcher of workers that build the rewards of a pool.

        Args:
            settings: Settings of the pool.
            deadlines: Bounds the waits for a start.
            cores: Cores that workers run on; empty for all.
            gpus: Assigns one GPU to each worker; None if workers see all.
        """
        self._settings = settings
        self._deadlines = deadlines
        self._cores = tuple(cores)
        self._gpus = gpus
        self._confinement = ""  # statements that a worker executes first

    async def confine(self) -> None:
        """Confine the workers that are started from now on."""
        self._confinement = await asyncio.to_thread(_confinement, self._settings.config)

    def spawn(self, name: str) -> WorkerProcess:
        """Start a process and tell it which rewards to build."""
        gpu = self._gpus.acquire() if self._gpus else None
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                child = start_python(
                    "antiphon.tasks.grading.worker:main",
                    *(theirs.fileno(), self._cores, gpu),
                    descriptors=[theirs.fileno()],
                    prelude=self._confinement,
                    own_session=True,  # Ctrl-C is ours to handle; killing the group ends what a reward started
                )
        except BaseException:
            ours.close()
            self._release(gpu)
            raise
        received = asyncio.Queue[bytes | None]()
        connection = FrameConnection(ours, received.put_nowait, lambda: received.put_nowait(None), limit=LONGEST_ANSWER)
        worker = WorkerProcess(name, child, connection, received, gpu)
        rewards, group_rewards = self._settings.rewards, self._settings.group_rewards
        worker.send(SetUp(rewards, group_rewards, os.getpid(), pack_objects()))
        return worker

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
            raise ConfigError(answer.message, value=answer.reward)
        if not isinstance(answer, Ready):
            await self._deadlines.wait(
                worker.child.wait(),
                name="end",
                owner="the grading pool",
                on="a grading worker",
                deadline=START_SECONDS,
            )
            raise WorkerDiedError(f"a grading worker {describe_exit(worker.child.exit_code)} before it was ready")

    async def stop(self, worker: WorkerProcess) -> None:
        """Kill a worker with all that it started, release its GPU and wait for its end; it may have ended before."""
        worker.kill()
        worker.connection.close()
        self._release(worker.gpu)
        await worker.child.wait()

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
