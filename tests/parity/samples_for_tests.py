"""What an engine sampled, as the learner gets it."""

import numpy as np

from antiphon.core.types import (
    AttemptId,
    AttemptStatus,
    GenerateRequest,
    PolicyVersion,
    Sample,
    Score,
    Segment,
    Streams,
    TrajectoryMeta,
    Turn,
)
from antiphon.engines.deltas import Delta


def sample_of(request: GenerateRequest, deltas: list[Delta], advantage: float = 0.0) -> Sample:
    """One attempt of one turn: the request's prompt, and what the deltas come to."""
    said = Delta.join(deltas)
    start = len(request.tokens)
    length = start + len(said.tokens)
    nothing, mask = np.zeros(start, np.float32), np.arange(length) >= start
    version = PolicyVersion(0, 0)
    return Sample(
        meta=TrajectoryMeta(
            id=AttemptId(0, int(request.id), 0),
            prompt_id="",
            task="",
            started=version,
            newest=version,
            status=AttemptStatus.FINISHED,
            score=Score.of(0.0),
        ),
        segment=Segment(
            tokens=np.concatenate([request.tokens, said.tokens]),
            loss_mask=mask,
            logprobs=np.concatenate([nothing, said.logprobs]),
            versions=np.concatenate([nothing.astype(np.int32), said.versions]),
            turns=(Turn(start=start, stop=length, sampling=request.sampling),),
        ),
        streams=Streams.placed(length, {start: said.streams}),
        advantages=np.where(mask, advantage, 0).astype(np.float32),
        weights=np.ones(length, np.float32),
    )
