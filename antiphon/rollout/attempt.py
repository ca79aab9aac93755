"""Attempts: the interface that runs them, and an attempt between its last token and its score."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from antiphon.core.types import (
    AttemptId,
    AttemptStatus,
    Failure,
    PolicyVersion,
    Prompt,
    Sampling,
    Score,
    ScoreStatus,
    Segment,
    Timing,
    Trajectory,
    TrajectoryMeta,
)
from antiphon.tasks.base import Transcript


@dataclass(frozen=True, slots=True, kw_only=True)
class UnscoredAttempt:
    """An attempt that was played and is not scored yet."""

    attempt: AttemptId
    prompt: Prompt
    started: PolicyVersion
    transcript: Transcript
    segments: tuple[Segment, ...]
    measures: Mapping[str, float]
    """What is known of how it went, to be reported beside its score."""
    prompt_tokens: int
    failure: Failure | None
    timing: Timing

    @property
    def completion_tokens(self) -> int:
        """Tokens that were sampled."""
        return sum(int(segment.loss_mask.sum()) for segment in self.segments)

    def trajectory(self, score: Score, finished: float) -> Trajectory:
        """What it comes to with this score."""
        failure = self.failure
        if failure is None and score.status is not ScoreStatus.SCORED:
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
    """What the scheduler needs of `EpisodeRunner`."""

    async def run(self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion) -> Trajectory: ...

    async def generate(
        self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion, sampling: Sampling | None = None
    ) -> UnscoredAttempt: ...

    async def score(self, played: UnscoredAttempt) -> Trajectory: ...
