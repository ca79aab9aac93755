"""Writing of checkpoints in a thread, one at a time, while the learner goes on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from antiphon.core.errors import AntiphonError
from antiphon.learning.learner import SAVED

PATIENCE = 0.005  # seconds that a call may have to wait for a look at the thread


class CheckpointWriter:
    """Runs one write at a time and reports its end: `SAVED`, or the text of the `AntiphonError`. Other errors are raised."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._begun: Future[None] | None = None

    def begin(self, write: Callable[[], None]) -> None:
        """Start a write, after `finish`."""
        self._begun = self._thread.submit(write)

    def poll(self) -> bool:
        """Wait briefly for the write; return True while it goes on."""
        if self._begun is not None and wait([self._begun], PATIENCE).done:
            self.finish()
        return self._begun is not None

    def finish(self) -> None:
        """Wait for the write that was begun, if any, and report its end."""
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
        """Wait for the write that was begun, without a report."""
        self._thread.shutdown()
