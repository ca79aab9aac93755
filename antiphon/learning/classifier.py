"""A worker that holds a sequence classifier, and reads the conversations that wait for it together."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification
from typing_extensions import override

from antiphon.core.deadlines import fail, succeed
from antiphon.core.decoder_checks import require_separable_sequences
from antiphon.core.errors import DataError, UnsupportedError
from antiphon.core.rpc import AsyncWorker
from antiphon.core.torch_profile import ProfiledWorker
from antiphon.core.types import IntArray, Message, Segment
from antiphon.learning.host_device_copy import to_device
from antiphon.learning.model.attention import PACKED_ATTENTION
from antiphon.learning.model.pack_layout import PackLayout
from antiphon.learning.prefix_tree import Span, build_prefix_tree
from antiphon.tasks.rendering import Renderer
from antiphon.tasks.rewards.reward_model import ClassifierOptions


class Classifier:
    """A sequence classifier of transformers with one label.

    A decoder reads conversations end to end in one row, and once what several of them begin with, such as the prompt of a
    group. Other models read padded rows.
    """

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
        self._pad: int | None = self._model.config.get_text_config().pad_token_id
        self._padded_attention: str = self._model.config._attn_implementation
        self.packs = _can_pack(self._model)
        if self.packs:
            self._model.set_attn_implementation(PACKED_ATTENTION)

    def encode(self, messages: Sequence[Message]) -> IntArray:
        """Return the tokens [L] of a conversation that ends with a response, with an end-of-sequence token."""
        prompt = self._renderer.encode_prompt(messages[:-1])
        return np.concatenate([prompt, self._renderer.encode_response(messages[-1].content)])

    @torch.inference_mode()
    def score(self, conversations: Sequence[IntArray]) -> list[float]:
        """Return the logit of each conversation, whatever is read beside it."""
        if self.packs:
            try:
                return self._score_pack(conversations)
            except UnsupportedError:  # such as attention with soft capping, which shows only here
                self.packs = False
                self._model.set_attn_implementation(self._padded_attention)
        return self._score_padded(conversations)

    def _score_pack(self, conversations: Sequence[IntArray]) -> list[float]:
        spans, lasts = _lay_out(conversations, self._pad)
        places: dict[Span | None, int] = {span: place for place, span in enumerate(spans)}
        lengths = np.array([len(span) for span in spans])
        parents = np.array([places.get(span.parent, -1) for span in spans])
        layout = PackLayout.of(lengths, parents, self._model.device)
        tokens = np.concatenate([conversations[span.owner][span.start : span.stop] for span in spans])
        hidden = self._model.base_model(
            input_ids=to_device(tokens, self._model.device).long()[None],
            position_ids=layout.positions[None],
            use_cache=False,
            layout=layout,
        ).last_hidden_state[0]
        logits = self._model.score(hidden[to_device(lasts, hidden.device)])
        return [float(value) for value in logits[:, 0].float().cpu()]

    def _score_padded(self, conversations: Sequence[IntArray]) -> list[float]:
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
        config = self._model.config.get_text_config()
        config.pad_token_id = next(token for token in range(config.vocab_size) if token not in ends)
        return config.pad_token_id


def _can_pack(model: PreTrainedModel) -> bool:
    """Return True if a model is a decoder that computes sequences which lie end to end each by itself."""
    if not isinstance(model, GenericForSequenceClassification):
        return False
    try:
        require_separable_sequences(model)
    except UnsupportedError:
        return False
    return True


def _lay_out(conversations: Sequence[IntArray], pad: int | None) -> tuple[list[Span], NDArray[np.int64]]:
    """Return the spans of a pack, parents first, and where the last token of each conversation that is no padding is."""
    segments = [_segment(tokens) for tokens in conversations]
    paths = build_prefix_tree(segments, share=True)
    spans = [*dict.fromkeys(span for path in paths for span in path)]
    starts = dict(zip(spans, np.cumsum([0, *map(len, spans)]).tolist(), strict=False))
    lasts = []
    for tokens, path in zip(conversations, paths, strict=True):
        last = int((np.arange(len(tokens)) * (tokens != pad)).argmax())  # as transformers finds it
        span = next(span for span in path if last < span.stop)
        lasts.append(starts[span] + last - span.start)
    return spans, np.array(lasts)


def _segment(tokens: IntArray) -> Segment:
    nothing = np.zeros(len(tokens))
    return Segment(
        tokens=tokens,
        loss_mask=nothing.astype(np.bool_),
        logprobs=nothing.astype(np.float32),
        versions=nothing.astype(np.int32),
        turns=(),
    )


class _Waiting(NamedTuple):
    tokens: IntArray
    score: "asyncio.Future[float]"


class ClassifierWorker(AsyncWorker, ProfiledWorker):
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
            for batch in batches(waiting, self._together, self._classifier.packs):
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


def batches(waiting: Sequence[_Waiting], most: int, packs: bool) -> Iterator[list[_Waiting]]:
    """Yield batches of at most so many tokens.

    Args:
        waiting: Conversations.
        most: Most tokens of a batch, unless one conversation has more.
        packs: Conversations that begin alike are read together, and what they share counts once; otherwise those of similar
            lengths, and padding counts.
    """
    batch: list[_Waiting] = []
    size = 0
    for each in sorted(
        (one for one in waiting if not one.score.done()),
        key=lambda one: one.tokens.tobytes() if packs else len(one.tokens),
    ):
        if packs:
            grown = size + len(each.tokens) - (_count_equal(batch[-1].tokens, each.tokens) if batch else 0)
        else:
            grown = (len(batch) + 1) * len(each.tokens)
        if batch and grown > most:
            yield batch
            batch, grown = [], len(each.tokens)
        batch.append(each)
        size = grown
    if batch:
        yield batch


def _count_equal(one: IntArray, other: IntArray) -> int:
    """Return how many tokens two conversations begin with in common."""
    shorter = min(len(one), len(other))
    differ = one[:shorter] != other[:shorter]
    return int(differ.argmax()) if differ.any() else shorter
