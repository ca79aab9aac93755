"""The inputs of a decoder for a pack with images: embeddings in which features of the images stand, and positions."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from antiphon.core.types import Pack, PlacedImage
from antiphon.core.vision import Pixels, VisionEncoder
from antiphon.learning.model.pack_layout import paths_to_ends


def decoder_inputs(encoder: VisionEncoder, pack: Pack, tokens: Tensor, positions: Tensor) -> dict[str, Any]:
    """Return the keyword arguments of the decoder, with `inputs_embeds` [1, T, H] and `position_ids` [1, T] or [3, 1, T].

    Args:
        encoder: Computes the features, with gradient if gradients are on. An image that occurs twice is computed once.
        pack: The pack.
        tokens: Its tokens [T].
        positions: The place [T] of each in its sequence.
    """
    pixels = {data: encoder.pixels(data) for data in {image.data: None for image in pack.images}}
    features = {data: encoder.features(found) for data, found in pixels.items()}
    places = [encoder.tokens_of(tokens, image) for image in pack.images]
    given = encoder.decoder_inputs(tokens, places, [features[image.data] for image in pack.images])
    return given | {"position_ids": _rotary_positions(encoder, pack, tokens, positions, pixels)}


def _rotary_positions(
    encoder: VisionEncoder, pack: Pack, tokens: Tensor, positions: Tensor, pixels: dict[bytes, Pixels]
) -> Tensor:
    if not pack.images:
        return positions[None]
    multiple = positions.expand(3, -1).clone()
    for path, images in _sequences_with_images(pack):
        at = torch.from_numpy(path).to(tokens.device)
        found = encoder.positions(tokens[at], images, [pixels[image.data] for image in images])
        if found is None:
            return positions[None]
        multiple[:, at] = found
    return multiple[:, None]


def _sequences_with_images(pack: Pack) -> Iterator[tuple[NDArray[np.int64], list[PlacedImage]]]:
    """Yield the tokens of each sample that has images, and the images with their places among these tokens."""
    for path in paths_to_ends(pack):
        images = []
        for image in pack.images:
            start = int(np.searchsorted(path, image.start))
            if start < len(path) and path[start] == image.start:
                images.append(image.shifted(start - image.start))
        if images:
            yield path, images
