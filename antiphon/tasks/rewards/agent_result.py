"""The result of an agent as its score."""

from antiphon.core.types import Prompt, Score
from antiphon.tasks.base import Transcript


def agent_result(prompt: Prompt, transcript: Transcript) -> Score | float:
    """Return the number or `Score` that the agent returned, or the number that its command wrote; ungraded if there is none."""
    result = transcript.result
    if isinstance(result, Score):
        return result
    try:
        return Score.of(float(result))
    except (TypeError, ValueError):
        return Score.ungraded(f"the agent returned {result!r:.100}, expected a number")
