"""The return of an episode: the sum of the environment's rewards."""

import math

from antiphon.core.types import Prompt, Score, ScoreStatus
from antiphon.tasks.base import Transcript


def environment_return(prompt: Prompt, transcript: Transcript) -> Score:
    """Return the undiscounted return and the reward of every turn; ungraded if no turn has one, or the sum is not finite."""
    rewards = [turn.reward for turn in transcript.turns]
    if all(reward is None for reward in rewards):
        return Score.ungraded("no turn has a reward: the task has no environment, or it gave none")
    turns = tuple(float(reward or 0.0) for reward in rewards)
    total = sum(turns)
    if not math.isfinite(total):
        return Score.ungraded(f"the rewards of the turns add up to {total}")
    return Score(status=ScoreStatus.SCORED, value=total, turns=turns)
