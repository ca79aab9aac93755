"""A worker that holds a sequence classifier, and reads the conversations that wait for it together."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification
from typing_extensions import override

from antiphon.core.deadlines import fail, succeed
from antiphon.core.errors import DataError
from antiphon.core.rpc import AsyncWorker
from antiphon.core.types import IntArray, Message
from antiphon.tasks.rendering import Renderer
from antiphon.tasks.rewards.reward_model import ClassifierOptions


class Classifier:
    """A sequence classifier of transformers with one label."""

    def __init__(self, path: str, device: str) -> None:
        """Load the model and tokenizer in the directory `path`.

        Raises:
            DataError: There is no model, or it has more than one label.
        """
        if not (Path(path) / "config.json").is_file():
            raise DataError(f"path {path!r}: there is no such model directory")
        self._renderer = Renderer(path)
        self._model = (
            AutoModelForSequenceClassification.from_pretrained(path, trust_remote_code=False).to(device).eval()
        )
        if self._model.config.num_labels != 1:
            raise DataError(
                f"path {path!r}: the model has {self._model.config.num_labels} labels, a reward model has 1"
            )
        self._pad: int | None = self._model.config.pad_token_id
        self._vocabulary = self._model.config.vocab_size

    def encode(self, messages: Sequence[Message]) -> IntArray:
        """Return the tokens [L] of a conversation that ends with a response, with an end-of-sequence token."""
        prompt = self._renderer.encode_prompt(messages[:-1])
        return np.concatenate([prompt, self._renderer.encode_response(messages[-1].content)])

    @torch.inference_mode()
    def score(self, conversations: Sequence[IntArray]) -> list[float]:
        """Return the logit of each conversation, whatever is read beside it."""
        pad = self._padding(conversations)
        longest = max(map(len, conversations))
        tokens = torch.full((len(conversations), longest), pad)
        mask = torch.zeros_like(tokens)
        for row, each in enumerate(conversations):
            tokens[row, : len(each)] = torch.from_numpy(each)
            mask[row, : len(each)] = 1
        device = self._model.device
        logits = self._model(input_ids=tokens.to(device), attention_mask=mask.to(device)).logits
        return [float(value) for value in logits[:, 0].float().cpu()]

    def _padding(self, conversations: Sequence[IntArray]) -> int:
        """Return the token to pad with.

        transformers takes the logit at the last token that is none of padding. A model without a padding token gets one that
        no conversation ends with, so that it is the last token of each.
        """
        if self._pad is not None:
            return self._pad
        ends = {int(each[-1]) for each in conversations}
        chosen = next(token for token in range(self._vocabulary) if token not in ends)
        self._model.config.pad_token_id = chosen
        return chosen


class _Waiting(NamedTuple):
    tokens: IntArray
    score: "asyncio.Future[float]"


class ClassifierWorker(AsyncWorker):
    """Answers `classify` and `health`."""

    def __init__(self, options: ClassifierOptions, threads: int, alone: bool = False) -> None:
        """Load the model; `DataError` if there is none.

        Args:
            options: Options of the model.
            threads: Threads that it computes with on a CPU.
            alone: Read each conversation alone: the last bits of a score depend on what is read beside it.
        """
        torch.set_num_threads(threads)
        self._classifier = Classifier(options.path, options.device)
        self._batch_tokens = options.batch_tokens
        self._together = 0 if alone else options.batch_tokens  # most tokens of a batch
        self._waiting: list[_Waiting] = []
        self._arrived = asyncio.Event()
        super().__init__()

    @override
    async def _live(self) -> None:
        async with asyncio.TaskGroup() as owner:
            owner.create_task(self._read_all(), name="read")
            await self._serve(owner, {"classify": self._classify, "health": self._answer_health})

    async def _answer_health(self) -> None:
        """Answer that the event loop runs."""

    async def _classify(self, messages: Sequence[Message]) -> float:
        tokens = self._classifier.encode(messages)
        if len(tokens) > self._batch_tokens:
            raise DataError(f"the conversation has {len(tokens)} tokens, more than batch_tokens = {self._batch_tokens}")
        waiting = _Waiting(tokens, self._loop.create_future())
        self._waiting.append(waiting)
        self._arrived.set()
        return await waiting.score

    async def _read_all(self) -> None:
        """Read what waits, round by round. Consumes conversations, waits for them, and produces their scores."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            waiting, self._waiting = self._waiting, []
            for batch in batches(waiting, self._together):
                await self._read(batch)

    async def _read(self, batch: Sequence[_Waiting]) -> None:
        """Read conversations together; if that fails, each alone, so that one that cannot be read fails alone."""
        try:
            values = await asyncio.to_thread(self._classifier.score, [each.tokens for each in batch])
        except torch.AcceleratorError:  # this process cannot use its device any more: another worker takes its place
            raise
        except (RuntimeError, ValueError, IndexError) as error:  # such as more tokens than the model has positions
            if len(batch) > 1:
                for each in batch:
                    await self._read([each])
            else:
                fail(batch[0].score, DataError(f"the reward model cannot read the conversation: {error}"))
            return
        for each, value in zip(batch, values, strict=True):
            succeed(each.score, value)


def batches(waiting: Sequence[_Waiting], most: int) -> Iterator[list[_Waiting]]:
    """Yield conversations of similar lengths together, so that a batch has at most so many tokens with its padding."""
    batch: list[_Waiting] = []
    for each in sorted((one for one in waiting if not one.score.done()), key=lambda one: len(one.tokens)):
        if batch and (len(batch) + 1) * len(each.tokens) > most:
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch
