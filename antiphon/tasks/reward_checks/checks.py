"""Check a reward on a few prompts before a run starts.

The right answer must score higher than an empty one and than nonsense, the same answer must score the same twice, no score may
lie outside the task's `reward_range`, and a grading may take at most half of its deadline. The right answer is the payload's
`response`, or its `answer`, as it is and in a box. On request the reward is also attacked with the responses of `attacks`: one
that scores as much as the right answer, or takes too long to grade, is a hole.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from antiphon.core.types import Message, Prompt, Score, ScoreStatus
from antiphon.tasks.base import Transcript
from antiphon.tasks.config import GradingConfig, TaskConfig
from antiphon.tasks.reward_checks.attacks import generate_attacks, has_tests

GARBAGE = "qwf zxv mnb qwf zxv plm okn ijb uhv ygc tfx rdz esw aqp lmk"
SLOW = 0.5  # share of the deadline above which a grading is a problem

Grade = Callable[[Prompt, Transcript], Awaitable[Score]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of checking one task; a mean is None if there was no score."""

    task: str
    gradings: int
    oracle: float | None
    empty: float | None
    garbage: float | None
    seconds: float  # of the slowest grading
    problems: tuple[str, ...]
    errors: tuple[str, ...] = ()  # of gradings that raised, or of the environment
    attacks: int = 0
    holes: tuple[str, ...] = ()  # causes of successful attacks, each once, and their result


def oracles(prompt: Prompt) -> list[str]:
    """Return ways to write the right answer of the payload; none if it has none."""
    payload: Mapping[str, Any] = prompt.payload if isinstance(prompt.payload, Mapping) else {}
    if isinstance(payload.get("response"), str):
        return [payload["response"]]
    answer = payload.get("answer")
    return [] if answer is None else [str(answer), rf"\boxed{{{answer}}}"]


async def check_reward(
    task: TaskConfig, prompts: Sequence[Prompt], grade: Grade, config: GradingConfig, *, attack: bool = False
) -> CheckResult:
    """Check the reward of `task` on `prompts`, with `attack` also by attacks; `config` has the deadline of gradings."""
    loop, slowest = asyncio.get_running_loop(), 0.0
    scores: dict[str, list[Score]] = {"oracle": [], "empty": [], "garbage": []}
    again: list[tuple[Score, Score]] = []

    async def timed_grade(prompt: Prompt, answer: str) -> Score:
        nonlocal slowest
        began = loop.time()
        score = await grade(prompt, Transcript([*prompt.messages, Message("assistant", answer)]))
        slowest = max(slowest, loop.time() - began)
        return score

    # One after another, so that only the grading is timed.
    for prompt in prompts:
        written = [await timed_grade(prompt, answer) for answer in oracles(prompt)]
        scores["oracle"] += [max(written, key=_value)] if written else []
        for kind, answer in (("empty", ""), ("garbage", GARBAGE)):
            scores[kind].append(await timed_grade(prompt, answer))
        repeated = (oracles(prompt) or [GARBAGE])[0]
        again.append((await timed_grade(prompt, repeated), await timed_grade(prompt, repeated)))
    means = {kind: fmean(values) if (values := _values(found)) else None for kind, found in scores.items()}
    every = [score for kind in scores.values() for score in kind] + [score for pair in again for score in pair]
    problems = [
        *_lost_gradings(every),
        *_order_problems(means, task),
        *_range_problems(every, task),
        *_unstable_scores(again),
    ]
    if slowest > SLOW * config.deadline:
        problems.append(
            f"a grading took {slowest:.2f} s, of the {config.deadline:g} s that it may take (grading.deadline)"
        )
    found = CheckResult(
        task=task.name,
        gradings=len(every),
        oracle=means["oracle"],
        empty=means["empty"],
        garbage=means["garbage"],
        seconds=slowest,
        problems=tuple(problems),
        errors=tuple(_describe_errors(every)),
    )
    return await _attack(found, task, prompts, grade, config) if attack and not problems else found


async def _attack(
    found: CheckResult, task: TaskConfig, prompts: Sequence[Prompt], grade: Grade, config: GradingConfig
) -> CheckResult:
    """Grade every attack on every prompt, and add the successful ones."""
    loop, tried, holes = asyncio.get_running_loop(), 0, dict[str, str]()
    for prompt in prompts:
        most = _highest_score(found, task, prompt)
        for attack in generate_attacks(prompt):
            tried, began = tried + 1, loop.time()
            score = await grade(prompt, Transcript([*prompt.messages, Message("assistant", attack.response)]))
            seconds = loop.time() - began
            if most is not None and _value(score) >= most:
                holes[attack.cause] = f"pays {score.value:.3g}, as for the right answer"
            elif seconds > SLOW * config.deadline and not attack.cause.startswith("code:"):  # which may run that long
                holes.setdefault(attack.cause, f"takes {seconds:.2f} s to grade")
    return replace(found, attacks=tried, holes=tuple(f"{cause}: {what}" for cause, what in holes.items()))


def _highest_score(found: CheckResult, task: TaskConfig, prompt: Prompt) -> float | None:
    """Return the score of a right answer; None if it is unknown."""
    if found.oracle is not None:
        return found.oracle
    if task.reward_range:
        return task.reward_range[1]
    return 1.0 if has_tests(prompt) else None


def _value(score: Score) -> float:
    return float("-inf") if score.value is None else score.value


def _values(scores: Sequence[Score]) -> list[float]:
    return [score.value for score in scores if score.value is not None]


def _lost_gradings(scores: Sequence[Score]) -> list[str]:
    """Describe lost gradings. An empty response may be left ungraded, but not all responses."""
    lost = [score for score in scores if score.status is ScoreStatus.INFRASTRUCTURE]
    if lost:
        return [f"{len(lost)} of {len(scores)} gradings were lost: {lost[0].detail}"]
    if not _values(scores):
        return [f"nothing could be graded: {scores[0].detail}"]
    return []


def _describe_errors(scores: Sequence[Score]) -> list[str]:
    """Describe the errors that a reward raised, unless it scored nothing at all, which is a problem by itself."""
    raised = [score for score in scores if score.raised]
    if not raised or not _values(scores):
        return []
    return [f"the reward raised an error in {len(raised)} of {len(scores)} gradings: {raised[0].detail}"]


def _order_problems(means: Mapping[str, float | None], task: TaskConfig) -> list[str]:
    oracle, problems = means["oracle"], []
    for kind in ("empty", "garbage"):
        value = means[kind]
        if oracle is not None and value is not None and value >= oracle:
            problems.append(f"an answer that is {kind} scores {value:.3g}, the right one {oracle:.3g}")
        elif oracle is None and value is not None and task.reward_range and value >= task.reward_range[1]:
            problems.append(f"an answer that is {kind} scores {value:.3g}, the most there is")
    return problems


def _range_problems(scores: Sequence[Score], task: TaskConfig) -> list[str]:
    least, most = task.reward_range or (float("-inf"), float("inf"))
    outside = [value for value in _values(scores) if not least <= value <= most]
    return [f"a score of {outside[0]:.3g} is outside of reward_range {[least, most]}"] if outside else []


def _unstable_scores(pairs: Sequence[tuple[Score, Score]]) -> list[str]:
    different = [pair for pair in pairs if pair[0].value != pair[1].value]
    if not different:
        return []
    one, other = different[0]
    return [f"the same answer scored {_describe(one)}, and then {_describe(other)}"]


def _describe(score: Score) -> str:
    return f"{score.value:.3g}" if score.value is not None else f"nothing ({score.detail})"
