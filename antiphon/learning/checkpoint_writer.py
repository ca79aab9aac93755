"""What a learner writes while it goes on: one checkpoint at a time, in a thread."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from antiphon.core.errors import AntiphonError
from antiphon.learning.learner import SAVED

PATIENCE = 0.005  # seconds that a call may have to wait for a look at the thread


class CheckpointWriter:
    """Has one piece of writing done at a time, and tells its end to who looks for it: `SAVED`, or the `AntiphonError` that it
    was. Any other error is raised there."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._begun: Future[None] | None = None

    def begin(self, write: Callable[[], None]) -> None:
        """Have this done, after `finish`."""
        self._begun = self._thread.submit(write)

    def poll(self) -> bool:
        """Wait a little; returns whether there is more to wait for."""
        if self._begun is not None and wait([self._begun], PATIENCE).done:
            self.finish()
        return self._begun is not None

    def finish(self) -> None:
        """Wait for what was begun, if anything was, and tell its end."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        try:
            begun.result()
        except AntiphonError as error:
            self._tell(str(error))
        else:
            self._tell(SAVED)

    def close(self) -> None:
        """Wait for what was begun; nobody is told."""
        self._thread.shutdown()
