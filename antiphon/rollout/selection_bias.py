"""Selection bias of scheduling: trained attempts compared with all that were dispatched.

Dropping attempts by time (redundancy, extra groups, expiry) favours short ones. The metrics here say by how much.
"""

from collections import Counter
from dataclasses import dataclass, field

from antiphon.core.types import AttemptStatus, Group, TrajectoryMeta


@dataclass(slots=True)
class _Mean:
    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1

    def __sub__(self, other: "_Mean") -> float:
        """Return the difference to the other mean, relative to it; 0 if either is unknown."""
        if not (self.count and other.count and other.total):
            return 0.0
        return self.total / self.count / (other.total / other.count) - 1


@dataclass(slots=True)
class BiasMeter:
    """Counts attempts over a whole run."""

    drops: Counter[AttemptStatus] = field(default_factory=Counter)
    _dispatched: Counter[str] = field(default_factory=Counter)  # attempts of each task
    _trained: Counter[str] = field(default_factory=Counter)
    _lengths: dict[bool, _Mean] = field(default_factory=lambda: {True: _Mean(), False: _Mean()})  # key: trained
    _seconds: dict[bool, _Mean] = field(default_factory=lambda: {True: _Mean(), False: _Mean()})
    _scores: dict[bool, _Mean] = field(default_factory=lambda: {True: _Mean(), False: _Mean()})
    _prompts: set[str] = field(default_factory=set)
    _never: set[str] = field(default_factory=set)  # prompts without an attempt that was trained on

    def record_dispatch(self, task: str, prompt: str) -> None:
        """Count an attempt that starts."""
        self._dispatched[task] += 1
        if prompt not in self._prompts:
            self._prompts.add(prompt)
            self._never.add(prompt)

    def record_finish(self, meta: TrajectoryMeta) -> None:
        """Count an attempt that came to its end, whatever becomes of it."""
        self._lengths[False].add(meta.completion_tokens)
        if meta.score.value is not None:
            self._scores[False].add(meta.score.value)

    def record_drop(self, status: AttemptStatus, seconds: float) -> None:
        """Count an attempt that was ended `seconds` after its group was admitted."""
        self.drops[status] += 1
        self._seconds[False].add(seconds)

    def list_untrained_tasks(self) -> list[str]:
        """Return the tasks with attempts, none of which was trained on."""
        return sorted(self._dispatched.keys() - self._trained.keys())

    def record_training(self, group: Group) -> None:
        """Count a group that a step takes."""
        for meta in (trajectory.meta for trajectory in group.trajectories):
            self._trained[meta.task] += 1
            self._lengths[True].add(meta.completion_tokens)
            self._seconds[True].add(meta.timing.finished - meta.timing.queued)
            if meta.score.value is not None:
                self._scores[True].add(meta.score.value)
        self._never.discard(group.prompt.id)

    def metrics(self) -> dict[str, float]:
        """Return relative differences between trained and other attempts.

        Length and score are compared with finished attempts, seconds with aborted ones, and the share of each task with
        dispatched attempts. `prompts_never_trained` is the share of prompts that were tried and never trained on.
        """
        result = {
            "bias/length": self._lengths[True] - self._lengths[False],
            "bias/score": self._scores[True] - self._scores[False],
            "bias/seconds": self._seconds[True] - self._seconds[False],
            "bias/prompts_never_trained": len(self._never) / max(len(self._prompts), 1),
        }
        if len(self._dispatched) > 1:
            trained, dispatched = max(self._trained.total(), 1), self._dispatched.total()
            for task, count in self._dispatched.items():
                result[f"bias/task/{task}"] = (self._trained[task] / trained) / (count / dispatched) - 1
        return result | {f"drops/{status}": float(count) for status, count in self.drops.items()}
