"""The model that a gateway serves: engines, and how their model reads and writes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from antiphon.core.types import Completion, GenerateRequest, IntArray
from antiphon.engines.deltas import Delta
from antiphon.rollout.gateway.capture import Tokenizer
from antiphon.rollout.gateway.chat import CONTEXT_LENGTH, ApiError


class Generate(Protocol):
    """The part of `EnginePool.generate` that the gateway uses."""

    async def __call__(self, request: GenerateRequest, on_delta: Callable[[Delta], None] | None = None) -> Completion:
        """Run one request to its end; `on_delta` is told of tokens as they come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A served model: its engines, tokenizer and limits."""

    generate: Generate
    tokenizer: Tokenizer
    max_length: int
    """Most tokens of a prompt and its reply together."""
    tools: str = "hermes"
    """The format of tool calls, see `tasks.tool_calls`."""
    name: str = "policy"

    def token_texts(self, tokens: IntArray) -> list[str]:
        """The text of each token; of special tokens it is empty."""
        return [self.tokenizer.decode(tokens[at : at + 1]) for at in range(len(tokens))]

    def tokens_left(self, prompt: IntArray) -> int:
        """Tokens that are left for a reply, at least one. `ApiError` for a prompt that is empty or too long."""
        if not len(prompt):
            raise ApiError("messages: there is nothing in them: the prompt has no tokens", code="empty_prompt")
        if (room := self.max_length - len(prompt)) < 1:
            raise ApiError(
                f"prompt is too long: {len(prompt)} tokens > {self.max_length - 1} maximum; "
                f"this model's maximum context length is {self.max_length} tokens",
                code=CONTEXT_LENGTH,
            )
        return room
