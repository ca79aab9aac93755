"""Training step by step: `async for step in run`, and `for step in run` for code that is not asynchronous."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from antiphon.core.blocking import LoopThread
from antiphon.record.metrics_table import plot_metric, read_metrics_table

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

    from antiphon.run.loop import Run

Train = Callable[[], Coroutine[Any, Any, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """A finished training step and its reduced metrics."""

    step: int
    metrics: Mapping[str, float]

    def __getitem__(self, metric: str) -> float:
        """Return a metric of the step; `KeyError` if it has no such metric."""
        return self.metrics[metric]


class Stepper:
    """Trains in a task that waits after each step until the next one is asked for."""

    def __init__(self, train: Train, stop: Callable[[], None]) -> None:
        """Start nothing yet.

        Args:
            train: Trains to the end, and awaits `after_step` after each step; returns the summary.
            stop: Makes it end after the step in hand.
        """
        self._train, self._stop = train, stop
        self._task: asyncio.Task[dict[str, Any]] | None = None
        self._done: asyncio.Queue[StepMetrics] = asyncio.Queue()
        self._next = asyncio.Event()

    async def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over a step, and wait until the next one is asked for; there is no deadline, since a person may read."""
        if self._task is None:  # nobody iterates
            return
        self._next.clear()
        self._done.put_nowait(StepMetrics(step, metrics))
        await self._next.wait()

    async def next_step(self) -> StepMetrics | None:
        """Train one step and return it; None once the run has ended. An error that ended the run is raised."""
        if self._task is None:
            self._task = asyncio.create_task(self._train(), name="train")
        self._next.set()
        handed_over = asyncio.ensure_future(self._done.get())
        try:
            await asyncio.wait({handed_over, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if handed_over.done():
                return handed_over.result()
            self._task.result()
            return None
        finally:
            handed_over.cancel()

    async def end(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End a run that was left before its last step: after the step in hand, or at once if an error is under way."""
        if self._task is None or (self._task.done() and kind is not None):
            return
        if kind is None:
            self._stop()
            self._next.set()
            await self._task
        else:
            self._task.cancel()
            await asyncio.wait({self._task})


class RunSession:
    """A run that is started by `async with`, as a `Run`, or by `with`, as a `BlockingRun`, and ended where the block ends."""

    def __init__(self, opened: "AbstractAsyncContextManager[Run]") -> None:
        self._opened = opened
        self._blocking: BlockingRun | None = None

    async def __aenter__(self) -> "Run":
        return await self._opened.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._opened.__aexit__(kind, error, trace)

    def __enter__(self) -> "BlockingRun":
        self._blocking = BlockingRun(self._opened)
        return self._blocking.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._blocking is not None
        self._blocking.close(error)


class BlockingRun:
    """A run in an event loop of its own thread, for code that is not asynchronous."""

    def __init__(self, opened: "AbstractAsyncContextManager[Run]") -> None:
        self._opened = opened
        self._started: Future[Run] = Future()
        self._exits = ExitStack()

    def start(self) -> Self:
        """Start the run's parts and wait for them."""
        self._leave: Future[BaseException | None] = Future()
        try:
            self._thread = self._exits.enter_context(LoopThread())
            self._life, self._run = self._thread.start(self._live(), self._started)
        except BaseException:
            self._exits.close()
            raise
        return self

    def close(self, error: BaseException | None) -> None:
        """End the run: after the step in hand, or at once if there is an error."""
        self._leave.set_result(error)
        with self._exits:
            try:
                self._thread.wait(self._life)
            except BaseException as raised:
                if raised is not error:
                    raise

    def __iter__(self) -> Iterator[StepMetrics]:
        """Train step by step."""
        while (step := self._thread.run(self._run.stepper.next_step())) is not None:
            yield step

    def stop(self) -> None:
        """End the run after the step in hand."""
        self._thread.call_soon(self._run.stop)

    @property
    def directory(self) -> Path:
        """Directory of the run."""
        return self._run.directory

    def metrics(self) -> "pandas.DataFrame":
        """Return the metrics of the steps so far, a row a step; needs pandas."""
        return read_metrics_table(self.directory)

    def plot(self, metric: str = "reward/mean") -> "Axes":
        """Draw a metric over the steps so far; needs matplotlib."""
        return plot_metric(self.directory, metric)

    async def _live(self) -> None:
        try:
            async with self._opened as run:
                self._started.set_result(run)
                error = await asyncio.wrap_future(self._leave)
                if error is not None:
                    raise error
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
            raise
