"""What a policy means to do, from the words that it says."""

import re
from collections.abc import Iterable

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def extract_answer(text: str) -> str:
    """What is to be taken as the action: the inside of the last `<answer>...</answer>`, or all of the text if it has none.

    >>> extract_answer("The goal is below. <answer> Down </answer>")
    'Down'
    """
    blocks = _ANSWER.findall(text)
    return str(blocks[-1] if blocks else text).strip()


def match_action(text: str, allowed: Iterable[str]) -> str | None:
    """The one of `allowed` that a policy said, whatever the case of its letters; None if it said something else.

    >>> match_action("<answer>DOWN</answer>", ("up", "down"))
    'down'
    """
    word = extract_answer(text).casefold()
    return next((each for each in allowed if each.casefold() == word), None)
