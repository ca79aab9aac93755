r"""Short answers in words, such as names and dates: compared without regard to case, articles, punctuation and markup.

The normalization is that of SQuAD's evaluation (Rajpurkar et al. 2016), but for signs that make another answer: a decimal point
or a sign between digits, a minus, and the signs of `C++`, `C#` and `5%` stay.
"""

import re
from collections import Counter
from collections.abc import Iterable

from antiphon.core.types import Prompt, Score
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.extract import (
    MARKUP,
    MINUS,
    MOST_STATEMENT_CHARACTERS,
    answer_statements,
    ground_truth,
    visible,
    zero_score,
)

_PUNCTUATION = re.compile(
    r"(?<=\d),(?=\d{3}(?!\d))"  # between thousands
    r"|(?<!\d)[.,:]|[.,:](?!\d)|-(?!\d)|(?<=[^\W\d_])-"  # not between digits, and no minus
    r"|[;!?'\"`()\[\]{}<>*_$\\“”‘’«»]"
)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def short_answer(
    prompt: Prompt,
    transcript: Transcript,
    *,
    answer: str = "answer",
    f1: bool = False,
    require_marker: bool = True,
) -> Score:
    r"""Return 1 if the response states one of the right answers.

    Args:
        prompt: Has the right answer in its payload, or a list of right answers.
        transcript: Has the response.
        answer: Key of the right answers.
        f1: Return the F1 score of the words instead, the highest over the right answers.
        require_marker: Accept only an announced answer (`\boxed{…}`, "the answer is …", "####"), or a response that is a single
            line. Without, the last line of a response counts.

    Raises:
        ValueError: There is no right answer.
    """
    right, response = _right_answers(prompt, answer), transcript.response
    lines = response.strip().splitlines() or [""]
    # The last statement, and the line that it is on: the point of "St. Louis" ends no sentence.
    stated = [each for whole in (False, True) for each in answer_statements(response, right, whole_lines=whole)[:1]]
    if not stated and (len(lines) == 1 or not require_marker):
        stated = lines[-1:]
    given = [normalize_answer(each) for each in stated if len(each) <= MOST_STATEMENT_CHARACTERS]
    if not given:
        return zero_score("the response states no short answer")
    expected = list(map(normalize_answer, right))
    return Score.of(max(_f1(one, other) if f1 else float(one == other) for one in given for other in expected))


def normalize_answer(text: str) -> str:
    """Return the words of an answer in lower case, without articles, punctuation and markup."""
    plain = MINUS.sub("-", MARKUP.sub("", visible(text)))
    words = _PUNCTUATION.sub("", re.sub(r"-\s+(?=\d)", "-", plain)).casefold()
    return " ".join(_ARTICLES.sub(" ", words).split()) or " ".join(words.split())  # the vitamin A is no article


def _right_answers(prompt: Prompt, key: str) -> list[str]:
    """Return the right answers as text."""
    text = ground_truth(prompt, key)
    given = prompt.payload[key]
    several = isinstance(given, Iterable) and not isinstance(given, str)
    right = [str(each) for each in given] if several else [text]
    if not all(normalize_answer(each) for each in right) or not right:
        raise ValueError(f"the right answer {text!r} of prompt {prompt.id} has no words")
    return right


def _f1(given: str, right: str) -> float:
    """Return the harmonic mean of the shares of words that the two have in common."""
    words, expected = given.split(), right.split()
    common = sum((Counter(words) & Counter(expected)).values())
    return 2 * common / (len(words) + len(expected)) if common else 0.0
