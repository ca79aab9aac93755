"""Images in the native engine: what stands for them in the slots' tokens, and the decoder's inputs that are made of them.

The tokens of an image all have one id, whichever image it is. In the slot table each has a negative number instead, made of
the image's digest: the comparison of prefixes, which finds what other slots have computed, so tells images apart.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from antiphon.core.errors import RequestError
from antiphon.core.types import GenerateRequest, IntArray
from antiphon.core.vision import CACHED_IMAGES, VisionEncoder
from antiphon.engines.native.attention import FlatBatch
from antiphon.engines.native.slots import Indices


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A request with images: the places of their tokens, and the positions of its tokens."""

    images: tuple[tuple[bytes, Indices], ...]  # file and places [N] of each
    stop: int  # one past the last of these places
    positions: Tensor | None  # [3, P] in the rotary embedding; None if they are plain
    offset: int  # difference between the position of a token behind the prompt and its place


class SlotImages:
    """The images of the requests in the slots."""

    def __init__(self, model: Any, directory: str) -> None:
        self._encoder = VisionEncoder(model, directory)
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()
        self._device = next(model.parameters()).device
        self._prompts: dict[int, _Prompt] = {}  # by slot, those with images
        self._features: OrderedDict[bytes, Tensor] = (
            OrderedDict()
        )  # by file, computed with the weights of `_weights_id`
        self._weights_id = -1

    @torch.inference_mode()
    def check(self, request: GenerateRequest, weights_id: int) -> None:
        """Raise `RequestError` or `UnsupportedError` for images that the model cannot be shown."""
        self._use_weights(weights_id)
        for image in request.attachments:
            own = int((request.tokens[image.start : image.stop] == self._encoder.token).sum())
            if (features := self._compute(image.data).shape[1]) != own:
                message = f"an image has {own} tokens, and the model computes {features} features of it"
                raise RequestError(f"request {request.id!r}: {message}")

    def mark(self, request: GenerateRequest) -> IntArray:
        """Return the tokens [P] of a request as the slot table has them."""
        tokens = request.tokens.astype(np.int32)
        for image in request.attachments:
            places = image.start + np.flatnonzero(tokens[image.start : image.stop] == self._encoder.token)
            numbers = np.random.default_rng(int(image.digest, 16)).integers(1, 1 << 31, len(places))
            tokens[places] = -numbers.astype(np.int32)
        return tokens

    def occupy(self, slot: int, request: GenerateRequest) -> None:
        """Note the request that a slot runs."""
        if request.attachments:
            self._prompts[slot] = self._describe(request)

    def _describe(self, request: GenerateRequest) -> _Prompt:
        tokens, images = torch.from_numpy(request.tokens.astype(np.int64)), request.attachments
        positions = self._encoder.positions(tokens, images, [self._encoder.pixels(image.data) for image in images])
        return _Prompt(
            images=tuple((image.data, self._encoder.tokens_of(tokens, image).numpy()) for image in images),
            stop=images[-1].stop,
            positions=None if positions is None else positions.to(self._device),
            offset=0 if positions is None else int(positions.max()) + 1 - positions.shape[1],
        )

    def release(self, slot: int) -> None:
        """Forget the images of a slot."""
        self._prompts.pop(slot, None)

    def run(self, tokens: Tensor, slots: Indices, keep: Tensor | int, batch: FlatBatch, weights_id: int) -> Tensor:
        """Run the model on tokens [T] of slots; return the logits [R, V] of the rows `keep`, or with 0 of all.

        Args:
            tokens: Tokens as the slot table has them.
            slots: The slot of each.
            keep: Rows whose logits are wanted.
            batch: Where the tokens are in their sequences and in the KV cache.
            weights_id: Of the present weights; what others have computed is forgotten.
        """
        self._use_weights(weights_id)
        given = self._decoder_inputs(tokens, slots, batch.positions)
        hidden = self._decoder(**given, use_cache=False, slot_batch=batch).last_hidden_state[0]
        logits: Tensor = self._head(hidden if isinstance(keep, int) else hidden[keep])
        return logits

    def _decoder_inputs(self, tokens: Tensor, slots: Indices, positions: Tensor) -> dict[str, Any]:
        """Return the keyword arguments of the decoder, with positions [1, T] or [3, 1, T] in the rotary embedding."""
        known = self._prompts.keys() & set(slots.tolist())
        own, begins = tokens.clamp(min=0), positions.cpu().numpy() if known else None
        rotary, multiple = positions.expand(3, -1).clone(), False
        rows, features = list[Tensor](), list[Tensor]()
        for slot in known:
            prompt, here = self._prompts[slot], np.flatnonzero(slots == slot)
            assert begins is not None
            begin = int(begins[here[0]])
            end = begin + len(here)  # the tokens of a slot follow one another
            for data, places in prompt.images if begin < prompt.stop else ():
                inside = (places >= begin) & (places < end)
                if inside.any():
                    rows.append(torch.from_numpy(here[places[inside] - begin]).to(positions.device))
                    features.append(self._compute(data)[:, torch.from_numpy(inside)])
            if prompt.positions is not None:
                inside_prompt = prompt.positions[:, begin:end]
                rotary[:, here] += prompt.offset
                rotary[:, here[: inside_prompt.shape[1]]] = inside_prompt
                multiple = True
        rotary = rotary[:, None] if multiple else positions[None]
        return self._encoder.decoder_inputs(own, rows, features) | {"position_ids": rotary}

    def _use_weights(self, weights_id: int) -> None:
        if weights_id != self._weights_id:
            self._features.clear()
            self._weights_id = weights_id

    def _compute(self, data: bytes) -> Tensor:
        """Return the features of an image; those that were used last are kept."""
        features = self._features.pop(data, None)
        self._features[data] = self._encoder.features(self._encoder.pixels(data)) if features is None else features
        if len(self._features) > CACHED_IMAGES:
            self._features.popitem(last=False)
        return self._features[data]
