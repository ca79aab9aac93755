"""Ends a run that makes no progress: all groups fail, or the filter rejects all."""

from collections import Counter

from antiphon.core.errors import RolloutError
from antiphon.core.types import Failure

MAX_FILTERED = 1000  # complete groups filtered in a row, after which the filter is taken to reject everything


class ProgressGuard:
    """Counts failures of attempts, and groups in a row that could not be trained on."""

    def __init__(self, max_failed: int) -> None:
        """Create a guard that raises at `max_failed` failed groups in a row."""
        self.failures: Counter[str] = Counter()  # of attempts, by source
        self._max_failed = max_failed
        self._last_failure = ""
        self._failed = 0  # groups in a row, without a complete one between them
        self._filtered = 0  # complete groups in a row, without one to train on between them

    def record_failure(self, failure: Failure) -> None:
        """Count a failed attempt."""
        self.failures[failure.source] += 1
        self._last_failure = failure.message

    def record_failed_group(self) -> None:
        """Count a failed group; raise `RolloutError` if too many failed in a row."""
        self._failed += 1
        if self._failed >= self._max_failed:
            raise RolloutError(f"the last {self._failed} groups failed: {self._last_failure}")

    def record_filtered_group(self) -> None:
        """Count a filtered group; raise `RolloutError` if too many were filtered in a row.

        A group that fails in between says nothing about the filter.
        """
        self._failed = 0
        self._filtered += 1
        if self._filtered >= MAX_FILTERED:
            raise RolloutError(
                f"the last {self._filtered} complete groups were filtered out (rollout.filter, mean_range of their tasks, or "
                "an environment that scores whole groups), and none could be trained on"
            )

    def record_trainable_group(self) -> None:
        """Note that a group can be trained on."""
        self._failed = self._filtered = 0
