"""Read the action from a response."""

import re
from collections.abc import Iterable

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def extract_answer(text: str) -> str:
    """Return the inside of the last `<answer>...</answer>`; all of the text if it has none.

    >>> extract_answer("The goal is below. <answer> Down </answer>")
    'Down'
    """
    blocks = _ANSWER.findall(text)
    return str(blocks[-1] if blocks else text).strip()


def match_action(text: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed action that the response names, ignoring case; None if it names none.

    >>> match_action("<answer>DOWN</answer>", ("up", "down"))
    'down'
    """
    word = extract_answer(text).casefold()
    return next((action for action in allowed if action.casefold() == word), None)
