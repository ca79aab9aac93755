"""Images in the native engine: what stands for them in the slots' tokens, and the decoder's inputs that are made of them.

The tokens of an image all have one id, whichever image it is. In the slot table each has a negative number instead, made of
the image's digest: the comparison of prefixes, which finds what other slots have computed, so tells images apart.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from antiphon.core.types import GenerateRequest, IntArray
from antiphon.core.vision import Pixels, VisionEncoder
from antiphon.engines.native.attention import FlatBatch
from antiphon.engines.native.slots import Indices


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A request with images: the places of their tokens, and the positions of its tokens."""

    images: tuple[tuple[str, Tensor], ...]  # digest and places [N] of each
    positions: Tensor | None  # [3, P] in the rotary embedding; None if they are plain

    @property
    def offset(self) -> int:
        """Difference between the position of a token behind the prompt and its place."""
        return 0 if self.positions is None else int(self.positions.max()) + 1 - self.positions.shape[1]


class SlotImages:
    """The images of the requests in the slots."""

    def __init__(self, model: Any, directory: str) -> None:
        self._encoder = VisionEncoder(model, directory)
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()
        self._prompts: dict[int, _Prompt] = {}  # by slot, those with images
        self._pixels: dict[str, Pixels] = {}  # by digest, of the images of these
        self._features: dict[str, Tensor] = {}  # by digest, computed with the weights of `_weights_id`
        self._weights_id = -1

    def mark(self, request: GenerateRequest) -> IntArray:
        """Return the tokens [P] of a request as the slot table has them."""
        tokens = request.tokens.astype(np.int32)
        for image in request.attachments:
            places = image.start + np.flatnonzero(tokens[image.start : image.stop] == self._encoder.token)
            numbers = np.random.default_rng(int(image.digest, 16)).integers(1, 1 << 31, len(places))
            tokens[places] = -numbers.astype(np.int32)
        return tokens

    def occupy(self, slot: int, request: GenerateRequest, device: torch.device) -> None:
        """Note the request that a slot runs."""
        if not (images := request.attachments):
            return
        for image in images:
            self._pixels.setdefault(image.digest, self._encoder.pixels(image.data))
        tokens = torch.from_numpy(request.tokens.astype(np.int64))
        positions = self._encoder.positions(tokens, images, [self._pixels[image.digest] for image in images])
        self._prompts[slot] = _Prompt(
            tuple((image.digest, self._encoder.tokens_of(tokens, image).to(device)) for image in images),
            None if positions is None else positions.to(device),
        )

    def release(self, slot: int) -> None:
        """Forget the images of a slot."""
        if self._prompts.pop(slot, None) is not None:
            used = {digest for prompt in self._prompts.values() for digest, _ in prompt.images}
            for digest in self._pixels.keys() - used:
                del self._pixels[digest]
                self._features.pop(digest, None)

    def run(self, tokens: Tensor, slots: Indices, keep: Tensor | int, batch: FlatBatch, weights_id: int) -> Tensor:
        """Run the model on tokens [T] of slots; return the logits [R, V] of the rows `keep`, or with 0 of all.

        Args:
            tokens: Tokens as the slot table has them.
            slots: The slot of each.
            keep: Rows whose logits are wanted.
            batch: Where the tokens are in their sequences and in the KV cache.
            weights_id: Of the present weights; what others have computed is forgotten.
        """
        if weights_id != self._weights_id:
            self._features.clear()
            self._weights_id = weights_id
        given = self._decoder_inputs(tokens, slots, batch.positions)
        hidden = self._decoder(**given, use_cache=False, slot_batch=batch).last_hidden_state[0]
        logits: Tensor = self._head(hidden if isinstance(keep, int) else hidden[keep])
        return logits

    def _decoder_inputs(self, tokens: Tensor, slots: Indices, positions: Tensor) -> dict[str, Any]:
        """Return the keyword arguments of the decoder, with positions [1, T] or [3, 1, T] in the rotary embedding."""
        own = tokens.clamp(min=0)
        rotary = positions.expand(3, -1).clone()
        rows, features, multiple = list[Tensor](), list[Tensor](), False
        for slot in self._prompts.keys() & set(slots.tolist()):
            prompt, here = self._prompts[slot], torch.from_numpy(np.flatnonzero(slots == slot)).to(positions.device)
            begin = int(positions[here[0]])
            end = begin + len(here)  # the tokens of a slot follow one another
            for digest, places in prompt.images:
                inside = (places >= begin) & (places < end)
                if inside.any():
                    rows.append(here[places[inside] - begin])
                    features.append(self._compute(digest)[:, inside])
            if prompt.positions is not None:
                known = prompt.positions[:, begin:end]
                rotary[:, here] += prompt.offset
                rotary[:, here[: known.shape[1]]] = known
                multiple = True
        rotary = rotary[:, None] if multiple else positions[None]
        return self._encoder.decoder_inputs(own, rows, features) | {"position_ids": rotary}

    def _compute(self, digest: str) -> Tensor:
        if digest not in self._features:
            self._features[digest] = self._encoder.features(self._pixels[digest])
        return self._features[digest]
