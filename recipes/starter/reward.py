"""The reward of this project. The function runs in a process of its own, with a deadline."""

from antiphon.core.types import Prompt
from antiphon.tasks.base import Transcript


def right_sum(prompt: Prompt, transcript: Transcript) -> float:
    """1 for the right sum behind the colon, 0.1 for a wrong one, 0 for a response without a colon."""
    _, colon, answer = transcript.response.rpartition(":")
    if answer == prompt.payload["answer"]:
        return 1.0
    return 0.1 if colon else 0.0
