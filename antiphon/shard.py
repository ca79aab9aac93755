"""A rollout worker: what `start` starts beside the loop of a run, in a process and an event loop of its own.

Its engines, environments and graders are processes of its node. The controller asks questions, which are answered as they are
done; see `rollout.shards`.
"""

import asyncio
import itertools
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from antiphon.cluster.base import CLUSTERS, Cluster
from antiphon.engines.base import InferenceEngine
from antiphon.errors import AntiphonError, WorkerDied
from antiphon.loop import supervised
from antiphon.record.events import RARE, Events
from antiphon.rollout.pool import EnginePool
from antiphon.rollout.shards import STARTED, Counts, Word
from antiphon.run_config import RunConfig
from antiphon.seats import Seat
from antiphon.start import graders, start_rollouts
from antiphon.waits import Waits
from antiphon.workers import Worker

ENGINES = 1000  # that a worker may have in its life, for each to have a number of its own


class RolloutWorker(Worker):
    """Runs attempts on engines of its own. All that it says, its loop says."""

    def __init__(
        self, serial: int, model: str, config: RunConfig, seats: Sequence[Seat], logs: Path | None, listening: bool
    ) -> None:
        """`config` has as many engines as there are `seats`; `listening` says whether anybody reads all events."""
        self._model = Path(model)
        self._config = config
        self._seats = seats
        self._logs = logs
        self._events = _Told(self._say, listening, serial * ENGINES)
        self._pool: EnginePool | None = None
        self._does: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._life = self._loop.create_task(self._live())
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)

    def start(self) -> None:
        """Begin; a word tells when it has started."""
        self._thread.start()

    def ask(self, key: int, method: str, args: tuple[Any, ...]) -> None:
        """Do something; a word tells when it is done, and what came of it."""
        self._loop.call_soon_threadsafe(self._begin, key, method, args)

    def cancel(self, key: int) -> None:
        """Do something no more."""
        self._loop.call_soon_threadsafe(self._stop, key)

    def close(self) -> None:
        """End all that it runs."""
        self._loop.call_soon_threadsafe(self._life.cancel)
        if self._thread.is_alive():
            self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._life)
        except asyncio.CancelledError:
            pass  # it was closed
        except BaseException as error:  # noqa: BLE001 - the boundary at which its end becomes a message
            traceback.print_exc()
            known = isinstance(error, AntiphonError)
            with suppress(OSError):  # the controller is gone
                self._say("died", value=error if known else WorkerDied(f"it failed:\n{traceback.format_exc()}"))

    async def _live(self) -> None:
        async with AsyncExitStack() as stack:
            waits, config = Waits(), self._config
            cluster: Cluster = CLUSTERS.resolve("local")(config.cluster, self._logs)
            stack.push_async_callback(cluster.close)
            tell = partial(self._say, "message", STARTED)
            grading, _ = await stack.enter_async_context(graders(cluster, config, waits, tell))
            self._pool, episodes, _ = await start_rollouts(
                cluster, self._model, grading, config, waits, self._events, stack, tell, seats=self._seats.__getitem__
            )
            pool = self._pool
            able: list[Callable[..., Coroutine[Any, Any, Any]]] = [episodes.run, episodes.play, episodes.score]
            able += [grading.score_group, pool.load, pool.catch_up, pool.lend, pool.take_back]
            self._does = {method.__name__: method for method in able} | {"health": partial(asyncio.sleep, 0)}
            await supervised([pool.watch(self._ask_for_weights)], self._serve)

    async def _serve(self, owner: asyncio.TaskGroup) -> None:
        self._owner = owner
        self._say("result")
        await asyncio.Event().wait()  # until it is closed

    async def _ask_for_weights(self, engine: InferenceEngine) -> None:
        self._say("stale")

    def _begin(self, key: int, method: str, args: tuple[Any, ...]) -> None:
        self._tasks[key] = self._owner.create_task(self._answer(key, method, args), name=method)

    async def _answer(self, key: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            self._say("result", key, await self._does[method](*args))
        except AntiphonError as error:
            self._say("error", key, error)
        finally:
            del self._tasks[key]

    def _stop(self, key: int) -> None:
        if (task := self._tasks.get(key)) is not None:
            task.cancel()

    def _say(self, kind: str, key: int = STARTED, value: Any = None) -> None:
        pool, counts = self._pool, Counts()
        if pool is not None:
            counts = Counts(pool.version, pool.engines, pool.generated_tokens, pool.requeued_tokens)
        self.emit(Word(kind, key, value, counts))


class _Told(Events):
    """Events that the controller is told of."""

    def __init__(self, say: Callable[..., None], listening: bool, first: int) -> None:
        super().__init__()
        self.numbers = itertools.count(first)
        self._say = say
        self._listening = listening

    @property
    def on(self) -> bool:
        """See `Events.on`."""
        return self._listening

    def add(self, event: str, **what: Any) -> None:
        """See `Events.add`."""
        if self._listening or event in RARE:
            self._say("event", value=(event, what))
