"""Messages to prompt tokens. What cannot be encoded is a failure of one attempt, not of the run."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from antiphon.core.errors import DataError
from antiphon.core.types import IntArray, Message, PlacedImage, Prompt

T = TypeVar("T")


class Tokenizer(Protocol):
    """The part of `tasks.rendering.Renderer` that episodes need."""

    eos_ids: tuple[int, ...]

    def encode_prompt(self, messages: list[Message]) -> IntArray:
        """Return the tokens of a prompt with these messages."""

    def encode_observation(self, messages: list[Message], observation: Message, *, closed: bool = True) -> IntArray:
        """Return the tokens that append an observation to these messages; `closed` if the last message ended with EOS."""

    def encode_images(
        self, messages: list[Message], observations: list[Message] = ..., *, closed: bool = True
    ) -> tuple[IntArray, tuple[PlacedImage, ...]]:
        """Return the tokens of a prompt, or with `observations` those to append for them, and the images among them."""

    def decode(self, tokens: IntArray) -> str:
        """Return the text of these tokens."""


class JudgeTokenizer(Protocol):
    """The part of `tasks.rendering.Renderer` that judges need."""

    special_texts: tuple[str, ...]

    def encode_prompt(self, messages: list[Message]) -> IntArray:
        """Return the tokens of a prompt with these messages."""

    def decode(self, tokens: IntArray) -> str:
        """Return the text of these tokens."""


class PromptError(Exception):
    """Messages that cannot become a prompt; becomes a `Failure`, never a score."""


class EncodedPrompt(NamedTuple):
    """Tokens of a prompt or an observation, and the images that some of them stand for."""

    tokens: IntArray
    images: tuple[PlacedImage, ...] = ()


class PromptEncoder:
    """Encodes prompts and observations; raises `PromptError` for what the tokenizer or its chat template refuses."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._last: tuple[Prompt, EncodedPrompt] | None = None

    def encode_task(self, prompt: Prompt) -> EncodedPrompt:
        """Return the tokens of a task's prompt. The last is cached: siblings begin one after another."""
        if self._last is None or self._last[0] is not prompt:
            self._last = prompt, self.encode(list(prompt.messages))
        return self._last[1]

    def encode(self, messages: list[Message]) -> EncodedPrompt:
        """Return the tokens of a prompt, at least one."""
        if any(message.images for message in messages):
            return EncodedPrompt(*_encode(self.tokenizer.encode_images, messages))
        tokens = _encode(self.tokenizer.encode_prompt, messages)
        if not len(tokens):
            raise PromptError(f"the prompt has no tokens: its {len(messages)} messages are empty")
        return EncodedPrompt(tokens)

    def encode_observation(
        self, messages: list[Message], observation: Message, last_token: int | None
    ) -> EncodedPrompt:
        """Return the tokens to append for an observation after a reply whose last token is `last_token`."""
        closed = last_token in self.tokenizer.eos_ids
        if observation.images:
            return EncodedPrompt(*_encode(self.tokenizer.encode_images, messages, [observation], closed=closed))
        return EncodedPrompt(_encode(self.tokenizer.encode_observation, messages, observation, closed=closed))


def _encode(encode: Callable[..., T], *args: Any, **options: Any) -> T:
    try:
        return encode(*args, **options)
    except DataError as error:
        raise PromptError(str(error)) from error
