"""Instructions about the beginning, the end and combinations of responses."""

from antiphon.tasks.rewards.instructions.registry import instruction


@instruction("combination:two_responses")
def two_responses(response: str) -> bool:
    """Return True for two different responses, separated by ******."""
    parts = [part.strip() for part in response.split("******")]
    given = [part for part in parts if part]
    return all(parts[1:-1]) and len(given) == 2 and given[0] != given[1]


@instruction("combination:repeat_prompt")
def repeat_prompt(response: str, *, prompt_to_repeat: str) -> bool:
    """Return True if the response begins with the request, in either case."""
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


@instruction("startend:end_checker")
def end_checker(response: str, *, end_phrase: str) -> bool:
    """Return True if the response ends with the phrase, ignoring case and quotation marks."""
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@instruction("startend:quotation")
def quotation(response: str) -> bool:
    """Return True if the response is in double quotation marks."""
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


@instruction("punctuation:no_comma")
def no_comma(response: str) -> bool:
    """Return True if the response has no comma."""
    return "," not in response
