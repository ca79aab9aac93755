"""Chooses the prompt of the next group: one of a group that a resume restores, a deferred one, or the next of the mixture."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from antiphon.core.types import Prompt

FindPrompt = Callable[[str, str, int], Prompt]  # by task, id and epoch


class NextPrompt(NamedTuple):
    """The prompt of the next group, and its number if it was live at the checkpoint of a resume."""

    prompt: Prompt
    group: int | None


class PromptQueue:
    """Prompts for groups that are about to be admitted."""

    def __init__(self, next_prompt: Callable[[], Prompt]) -> None:
        """Create a queue over a source of prompts that never ends."""
        self._next_prompt = next_prompt
        self._restored: deque[NextPrompt] = deque()
        self._deferred: deque[Prompt] = deque()  # tail batching: prompts that wait for a long round

    @property
    def deferred(self) -> int:
        """Number of prompts that wait for a long round."""
        return len(self._deferred)

    def defer(self, prompt: Prompt) -> None:
        """Keep a prompt for a long round."""
        self._deferred.append(prompt)

    def pop(self, long_round: bool) -> NextPrompt:
        """Return the next prompt; a long round takes those that wait for it."""
        if self._restored:
            return self._restored.popleft()
        return NextPrompt(self._deferred.popleft() if long_round else self._next_prompt(), None)

    def state(self, live: list[tuple[int, Prompt]], long_round: bool) -> dict[str, Any]:
        """Return what a checkpoint keeps, given the prompts of live groups by number.

        A long round that was under way begins again after a resume.
        """
        groups = [(group, _identity(prompt)) for group, prompt in live]
        deferred = [_identity(prompt) for prompt in self._deferred]
        if long_round:
            groups, deferred = [], [identity for _, identity in groups] + deferred
        return {"live": groups, "deferred": deferred}

    def restore(self, state: Mapping[str, Any], find: FindPrompt) -> None:
        """Continue where `state` was taken: live groups get their prompts again, under their numbers."""
        self._restored.extend(NextPrompt(find(*identity), group) for group, identity in state["live"])
        self._deferred.extend(find(*identity) for identity in state["deferred"])


def _identity(prompt: Prompt) -> tuple[str, str, int]:
    return prompt.task, prompt.id, prompt.epoch
