"""Instruction following by verifiable instructions, as in IFEval."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from antiphon.core.types import Prompt, Score
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.extract import visible
from antiphon.tasks.rewards.instructions import CHECKS


def instruction_following(
    prompt: Prompt, transcript: Transcript, *, loose: bool = False, all_or_nothing: bool = False
) -> Score:
    """Return the share of followed instructions; with `all_or_nothing` 1 for all of them, else 0.

    The payload is a row of the published data: `instruction_id_list`, and `kwargs` with one mapping an instruction, in which
    None values are dropped. With `loose` an instruction is followed if one of eight variants of the response follows it:
    without the first line, the last, both or neither, each with and without asterisks. Invisible signs do not count. The parts
    are 1 or 0 by instruction.

    Raises:
        ValueError: An instruction is unknown, or does not take its kwargs.
    """
    response = visible(transcript.response)
    texts = variants(response) if loose else [response]
    parts = {
        name: float(any(text.strip() and CHECKS[instruction](text, **kwargs) for text in texts))
        for name, instruction, kwargs in _instructions(prompt)
    }
    share = sum(parts.values()) / len(parts)
    return Score.of(float(share == 1) if all_or_nothing else share, **parts)


def variants(response: str) -> list[str]:
    """Return the variants of a response that loose accuracy accepts."""
    lines = response.split("\n")
    cut = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    return [text for kept in (response, *cut) for text in (kept, kept.replace("*", ""))]


def _instructions(prompt: Prompt) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the reported name, the instruction and the kwargs of each."""
    payload = prompt.payload if isinstance(prompt.payload, Mapping) else {}
    names, all_kwargs = payload.get("instruction_id_list"), payload.get("kwargs")
    if not names or all_kwargs is None or len(names) != len(all_kwargs):
        raise ValueError(
            f"the payload of prompt {prompt.id} needs 'instruction_id_list' and 'kwargs', lists of one length, not empty"
        )
    for place, (name, given) in enumerate(zip(names, all_kwargs, strict=True)):
        if name not in CHECKS:
            raise ValueError(
                f"prompt {prompt.id} has an unknown instruction {name!r}: valid are {', '.join(sorted(CHECKS))}"
            )
        kwargs = {key: value for key, value in (given or {}).items() if value is not None}
        try:
            inspect.signature(CHECKS[name]).bind("", **kwargs)
        except TypeError as error:
            raise ValueError(f"prompt {prompt.id}, instruction {name!r}: {error}") from None
        yield name if name not in names[:place] else f"{name}/{place}", name, kwargs
