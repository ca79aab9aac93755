"""Reasoning Gym's own graders."""

import functools
import json
from typing import Any

import reasoning_gym as gym

from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.extract import last_match, wrong
from antiphon.types import Prompt, Score


def reasoning_gym(
    prompt: Prompt, transcript: Transcript, *, pattern: str | None = None, partial_credit: bool = True
) -> Score:
    """The dataset's `score_answer` for the whole response, or with `pattern`, a regular expression, for what its last
    match captures. Many datasets give a part of a point for a wrong answer that contains the right one; without
    `partial_credit` such an answer is worth 0. The payload is a row of the `reasoning_gym` source."""
    given = last_match(pattern, transcript.response)
    if given is None:
        return wrong("nothing in the response matches the pattern")
    grader = _dataset(json.dumps(prompt.payload["dataset"], sort_keys=True))
    value = float(grader.score_answer(given, prompt.payload))
    return Score.of(value if partial_credit or value >= 1.0 else 0.0, partial=value)


@functools.cache
def _dataset(settings: str) -> Any:
    return gym.create_dataset(**json.loads(settings))
