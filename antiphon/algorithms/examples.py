"""Small groups of samples, to try an advantage by hand; `losses.example` makes inputs of a loss."""

from collections.abc import Sequence

import numpy as np

from antiphon.algorithms.trajectories import Samples
from antiphon.core.types import (
    AttemptId,
    AttemptStatus,
    PolicyVersion,
    Sample,
    Sampling,
    Score,
    Segment,
    Streams,
    StreamSpec,
    TrajectoryMeta,
    Turn,
)


def example(
    *groups: Sequence[float],
    tokens: int = 1,
    paid: Sequence[float] = (),
    values: Sequence[float] = (),
    states: Sequence[str] = (),
) -> Samples:
    """Return groups of trajectories with these rewards, to try an advantage by hand.

    Each trajectory has a prompt token, then `tokens` sampled tokens, each a turn.

    Args:
        groups: Rewards of the trajectories of each group.
        tokens: Sampled tokens of a trajectory.
        paid: Rewards of its first turns.
        values: Values of its first sampled tokens.
        states: State keys of its first turns.
    """

    def make_sample(group: int, sibling: int, reward: float) -> Sample:
        version, blank = PolicyVersion(0, 0), np.zeros(tokens + 1, np.float32)
        return Sample(
            meta=TrajectoryMeta(
                id=AttemptId(group, sibling, 0),
                prompt_id=str(group),
                task="",
                started=version,
                newest=version,
                status=AttemptStatus.FINISHED,
                score=Score.of(reward),
            ),
            segment=Segment(
                tokens=blank.astype(np.int32),
                loss_mask=np.arange(tokens + 1) > 0,
                logprobs=blank,
                versions=blank.astype(np.int32),
                turns=_make_turns(tokens, paid, states),
            ),
            streams=Streams(
                {StreamSpec("values", "float64", (1,)): np.array([[0.0], *([value] for value in values)])}
                if values
                else {}
            ),
            advantages=blank,
            weights=blank + 1,
            reward=reward,
        )

    return [[make_sample(number, n, reward) for n, reward in enumerate(group)] for number, group in enumerate(groups)]


def _make_turns(tokens: int, paid: Sequence[float], states: Sequence[str]) -> tuple[Turn, ...]:
    """Return one turn for each sampled token; later turns have no reward or state where these sequences end."""
    return tuple(
        Turn(
            start=i + 1,
            stop=i + 2,
            sampling=Sampling(max_tokens=1),
            reward=paid[i] if i < len(paid) else None,
            state_key=states[i] if i < len(states) else None,
        )
        for i in range(tokens)
    )
