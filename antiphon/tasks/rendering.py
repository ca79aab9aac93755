"""Convert messages to tokens, once: sampled tokens are never tokenized again."""

import json
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from transformers import PreTrainedTokenizerFast  # unlike AutoTokenizer, it leaves torch out of the controller

from antiphon.core.errors import DataError
from antiphon.core.token_texts import split_tokens
from antiphon.core.types import IntArray, Message, PlacedImage, Prompt
from antiphon.tasks.image_prompts import ImageTokens, template_content

CACHED_TEXTS = 256  # siblings of a group tokenize the same prompt one after the other
_PLACEHOLDER = "ANTIPHONPLACEHOLDER"

Tools = Sequence[Mapping[str, Any]]


class Renderer:
    """The tokenizer of a model directory, and its chat template if it has one."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        if not (self.directory / "tokenizer.json").is_file():
            message = f"{directory} has no tokenizer.json; write one there with AutoTokenizer's save_pretrained"
            raise DataError(message, path=self.directory / "tokenizer.json")
        self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
        legacy = self.directory / "chat_template.json"  # where processors had it before
        if not self._tokenizer.chat_template and legacy.is_file():
            self._tokenizer.chat_template = json.loads(legacy.read_text(encoding="utf-8")).get("chat_template")
        self._encode = lru_cache(maxsize=CACHED_TEXTS)(self._encode_uncached)
        self._images = cache(partial(ImageTokens, self.directory))
        self.eos_ids = self._read_eos_ids()
        """Tokens that end a completion, ascending."""
        added = self._tokenizer.added_tokens_decoder.values()
        self.special_texts = tuple(sorted({*self._tokenizer.all_special_tokens, *(str(each) for each in added)}))
        """What the tokenizer reads as one token in any text, such as the marks of the chat template."""

    @property
    def chat(self) -> bool:
        """True if the model has a chat template; without one, a conversation is its contents end to end."""
        return bool(self._tokenizer.chat_template)

    def vocabulary(self) -> dict[str, int]:
        """Return the number of each token."""
        found: dict[str, int] = self._tokenizer.get_vocab()
        return found

    def encode_prompt(self, messages: Sequence[Message], tools: Tools = ()) -> IntArray:
        """Return the tokens [P] of a prompt of text; `tools` are JSON schemas of functions as in OpenAI's API.

        Raises:
            DataError: A message has images, which `encode_images` reads, or the template refuses the messages.
        """
        _require_text(messages)
        if self.chat:
            return self._encode(self._render(messages, tools), add_special_tokens=False)
        return self._encode(self._concatenate(messages, tools), add_special_tokens=True)

    def encode_images(
        self,
        messages: Sequence[Message],
        observations: Sequence[Message] = (),
        *,
        tools: Tools = (),
        closed: bool = True,
    ) -> tuple[IntArray, tuple[PlacedImage, ...]]:
        """Return the tokens that `encode_prompt` returns, or with observations `encode_observations`, and the images in them.

        Raises:
            DataError: The model reads no images, or has no chat template.
        """
        images = [image for message in observations or messages for image in message.images]
        if not images and observations:
            return self.encode_observations(messages, observations, tools=tools, closed=closed), ()
        if not images:
            return self.encode_prompt(messages, tools), ()
        if not self.chat:
            message = f"{self.directory} has no chat template, so images cannot be shown to its model"
            raise DataError(message, path=self.directory)
        text = self._render_tail(messages, observations, tools) if observations else self._render(messages, tools)
        tokens, placed = self._images().encode(text, images, add_special_tokens=False)
        if not observations or not self._repeats_end(tokens, closed):
            return tokens, placed
        return tokens[1:], tuple(image.shifted(-1) for image in placed)

    def encode_observation(self, messages: Sequence[Message], observation: Message, *, closed: bool = True) -> IntArray:
        """Return the tokens to append after a sampled turn, for one observation."""
        return self.encode_observations(messages, [observation], closed=closed)

    def encode_observations(
        self, messages: Sequence[Message], observations: Sequence[Message], *, tools: Tools = (), closed: bool = True
    ) -> IntArray:
        """Return the tokens to append after a sampled turn, so that the policy answers `observations`.

        Args:
            messages: The conversation up to that turn, which is the last message.
            observations: Messages that follow it.
            tools: JSON schemas of functions as in OpenAI's API.
            closed: True if the sampled tokens end with an end-of-sequence token; otherwise the template's comes first.

        Raises:
            DataError: The template does not render the turn's text, so what follows it cannot be found.
        """
        if not messages or messages[-1].role != "assistant":
            raise ValueError("an observation follows an assistant message")
        _require_text(observations)
        if not self.chat:
            return self._encode(self._concatenate(observations, tools), add_special_tokens=False)
        tokens = self._encode(self._render_tail(messages, observations, tools), add_special_tokens=False)
        return tokens[1:] if self._repeats_end(tokens, closed) else tokens

    def encode(self, text: str) -> IntArray:
        """Return the tokens of a text, without special tokens."""
        return self._encode(text, add_special_tokens=False)

    def encode_text(self, text: str) -> IntArray:
        """Return the tokens of a text that is to be continued, with the special tokens that the tokenizer adds to a text."""
        return self._encode(text, add_special_tokens=True)

    def encode_response(self, text: str) -> IntArray:
        """Return the tokens of a written answer, with the end-of-sequence token."""
        self._require_end()
        tokens = self._encode(text, add_special_tokens=False)
        return np.append(tokens, np.int32(self._tokenizer.eos_token_id)).astype(np.int32)

    def encode_example(self, prompt: Prompt, response: str) -> tuple[IntArray, IntArray, tuple[PlacedImage, ...]]:
        """Return the tokens of a prompt, those of the answer under `response` in its payload, and the prompt's images."""
        text = prompt.payload.get(response)
        if not isinstance(text, str):
            known = ", ".join(map(str, prompt.payload))
            message = f"sft.response: prompt {prompt.id!r} has no text under {response!r}; it has {known}"
            raise DataError(message, column=response)
        tokens, images = self.encode_images(prompt.messages)
        return tokens, self.encode_response(text), images

    def decode(self, tokens: IntArray) -> str:
        """Return the text of tokens, without special tokens."""
        return cast(str, self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    def split(self, tokens: IntArray) -> list[str]:
        """Return the text that each token adds, special tokens included; see `split_tokens`."""
        return split_tokens(
            lambda ids: cast(str, self._tokenizer.decode(ids, skip_special_tokens=False)), tokens.tolist()
        )

    def _render(self, messages: Sequence[Message], tools: Tools) -> str:
        plain = [_template_message(message) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                plain, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # named boundary: a template may raise anything
            message = f"the chat template of {self.directory} refuses these messages: {error}"
            raise DataError(message, path=self.directory) from error
        return cast(str, text)

    def _render_tail(self, messages: Sequence[Message], observations: Sequence[Message], tools: Tools = ()) -> str:
        """Return the text that follows the text of the last of `messages`, a turn of the model."""
        # A placeholder stands for the turn's text: templates strip and rewrite contents, and the sampled tokens stay as they
        # are. The rendered text behind it is what follows the turn.
        placeholder = _placeholder(messages, observations)
        turn = Message("assistant", placeholder)
        _, found, tail = self._render([*messages[:-1], turn, *observations], tools).rpartition(placeholder)
        if not found:
            message = f"the chat template of {self.directory} leaves out an assistant's message before the last"
            raise DataError(message, path=self.directory)
        return tail

    def _repeats_end(self, tokens: IntArray, closed: bool) -> bool:
        """Return True if tokens begin with the end of a turn whose sampled tokens have it already."""
        return closed and len(tokens) > 0 and int(tokens[0]) in self.eos_ids

    def _concatenate(self, messages: Sequence[Message], tools: Tools) -> str:
        if tools or any(message.tool_calls for message in messages):
            message = f"{self.directory} has no chat template, so tools cannot be described to its model"
            raise DataError(message, path=self.directory)
        if any(message.role == "assistant" for message in messages):
            self._require_end()
        end = {"assistant": self._tokenizer.eos_token}  # of earlier responses
        return "".join(message.content + end.get(message.role, "") for message in messages)

    def _require_end(self) -> None:
        if self._tokenizer.eos_token_id is None:
            message = f"the tokenizer of {self.directory} has no end-of-sequence token, with which a response ends"
            raise DataError(message, path=self.directory)

    def _encode_uncached(self, text: str, *, add_special_tokens: bool) -> IntArray:
        """Encode a text; `DataError` if the vocabulary does not cover it, or it is not valid Unicode."""
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # named boundary: tokenizers raise plain exceptions
            message = f"the tokenizer of {self.directory} cannot encode {text[:100]!r}: {error}"
            raise DataError(message, path=self.directory) from error
        tokens = np.asarray(ids, dtype=np.int32)
        tokens.setflags(write=False)  # it is cached
        return tokens

    def _read_eos_ids(self) -> tuple[int, ...]:
        """Read the end-of-sequence tokens of the tokenizer and of generation_config.json, where chat models list them."""
        ids = {self._tokenizer.eos_token_id}
        file = self.directory / "generation_config.json"
        if file.is_file():
            listed = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            ids.update(listed if isinstance(listed, list) else [listed])
        return tuple(sorted(ids - {None}))


def _template_message(message: Message) -> dict[str, Any]:
    """Return a message in the form that chat templates expect."""
    plain: dict[str, Any] = {"role": message.role, "content": template_content(message)}
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _require_text(messages: Sequence[Message]) -> None:
    """Raise `DataError` if a message has images, for which the text of a prompt has no tokens yet."""
    if count := sum(len(message.images) for message in messages):
        raise DataError(f"the prompt has {count} images; here, prompts are text only")


def _placeholder(*conversations: Sequence[Message]) -> str:
    """Return a word that occurs in none of the messages."""
    texts = repr(conversations)
    word = _PLACEHOLDER
    while word in texts:
        word += "X"
    return word
