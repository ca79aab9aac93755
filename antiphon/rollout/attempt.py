"""Attempts: the interface that runs them, and an attempt between its last token and its score."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from antiphon.core.types import (
    AttemptId,
    AttemptStatus,
    Failure,
    PolicyVersion,
    Prompt,
    Sampling,
    Score,
    Segment,
    Timing,
    Trajectory,
    TrajectoryMeta,
)
from antiphon.tasks.base import Transcript

# Bounds of a log-prob, the upper with room for rounding. Servers that cannot write minus infinity write -9999.
MAX_LOGPROB, MIN_LOGPROB = 0.01, -1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptInputs:
    """Inputs of one attempt.

    Attributes:
        prompt: The prompt.
        attempt: Id of the attempt.
        started: Version of the policy at which it starts.
        sampling: How tokens are sampled.
        priority: Of its requests; lower values go first.
    """

    prompt: Prompt
    attempt: AttemptId
    started: PolicyVersion
    sampling: Sampling
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnscoredAttempt:
    """An attempt that has ended and is not scored yet."""

    attempt: AttemptId
    prompt: Prompt
    started: PolicyVersion
    transcript: Transcript
    segments: tuple[Segment, ...]
    measures: Mapping[str, float]
    """Facts about the episode by name, reported beside its score."""
    prompt_tokens: int
    failure: Failure | None
    timing: Timing

    @property
    def completion_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(int(segment.loss_mask.sum()) for segment in self.segments)

    def to_trajectory(self, score: Score, finished: float) -> Trajectory:
        """Return the trajectory with a score, scored at the loop time `finished`."""
        failure = self.failure
        if failure is None and not score.status.is_verdict:
            failure = Failure(source="reward", message=score.detail)
        sampled = [segment.versions[segment.loss_mask] for segment in self.segments]
        newest = max((int(versions.max()) for versions in sampled if len(versions)), default=self.started.n)
        meta = TrajectoryMeta(
            id=self.attempt,
            prompt_id=self.prompt.id,
            task=self.prompt.task,
            started=self.started,
            newest=PolicyVersion(self.started.lineage, newest),
            status=AttemptStatus.FAILED if failure else AttemptStatus.FINISHED,
            score=score,
            failure=failure,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            turns=sum(len(segment.turns) for segment in self.segments),
            truncated=self.transcript.truncated,
            timing=Timing(queued=self.timing.queued, started=self.timing.started, finished=finished),
        )
        return Trajectory(meta=meta, payload=self.segments)


class AttemptRunner(Protocol):
    """Runs attempts for the scheduler: `EpisodeRunner`, or one that wraps it."""

    async def run(self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion) -> Trajectory:
        """Run one attempt and score it."""

    async def generate(
        self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion, sampling: Sampling | None = None
    ) -> UnscoredAttempt:
        """Run one attempt to its last token."""

    async def score(self, unscored: UnscoredAttempt) -> Trajectory:
        """Score an attempt, unless it has failed."""


def find_bad_logprob(segments: Sequence[Segment]) -> Failure | None:
    """Return a failure if the log-prob of some sampled token is impossible; None if all are possible."""
    for number, segment in enumerate(segments):
        logprobs = segment.logprobs
        possible = (logprobs <= MAX_LOGPROB) & (logprobs > MIN_LOGPROB)  # both are false for NaN
        bad = np.flatnonzero(segment.loss_mask & ~possible)
        if len(bad):
            at = int(bad[0])
            message = f"its engine gave token {at} of sample {number} the log-prob {logprobs[at]:g}, which no sampled token has"
            return Failure(source="engine", message=message)
    return None
