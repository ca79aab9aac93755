"""Prompts with images: how a chat template names them, and which tokens stand for them."""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.core.errors import DataError, UnsupportedError
from antiphon.core.image_checks import check_image, open_image
from antiphon.core.types import IMAGE_MARKER, IntArray, Message, PlacedImage


def template_content(message: Message) -> str | list[dict[str, str]]:
    """Return the content of a message in the form that chat templates expect: a text, or texts and images in order.

    Raises:
        DataError: The content has another number of markers than there are images.
    """
    if not message.images:
        return message.content
    texts = message.content.split(IMAGE_MARKER)
    if len(texts) != len(message.images) + 1:
        raise DataError(
            f"a message has {len(message.images)} images and {len(texts) - 1} times {IMAGE_MARKER} in its content, where "
            "they are to stand"
        )
    parts: list[dict[str, str]] = []
    for number, text in enumerate(texts):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


class WithoutVideos:
    """Mixin for a processor of transformers that does without a part for videos, which would need torchvision."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        """Return the names of the processor's parts."""
        parts: list[str] = super().get_attributes()  # type: ignore[misc]  # of the processor that it is mixed into
        return [name for name in parts if name != "video_processor"]


def _load_processor(directory: Path, config: Any) -> Any:
    """Load the processor in a model directory: of the class that its files name, or else that of the model."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    files = (directory / name for name in ("processor_config.json", "preprocessor_config.json"))
    named = (json.loads(file.read_text(encoding="utf-8")).get("processor_class") for file in files if file.is_file())
    kind = getattr(transformers, next(filter(None, named), ""), None) or PROCESSOR_MAPPING[type(config)]
    processor: Any = type(kind.__name__, (WithoutVideos, kind), {})
    return processor.from_pretrained(directory, backend="pil")


class ImageTokens:
    """Expands the images of rendered texts to tokens, with the processor of a model directory."""

    def __init__(self, directory: Path) -> None:
        """Load the processor; `DataError` if the model reads no images."""
        from transformers import AutoConfig  # it imports torch, which only runs with images need here

        from antiphon.core.vision import CACHED_IMAGES, image_token, reads_images, require_family

        try:
            config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
            if not reads_images(config):
                raise DataError("it reads text only")
            require_family(config)
            self._processor = _load_processor(directory, config)
        except (
            DataError,
            UnsupportedError,
            OSError,
            ValueError,
            ImportError,
            KeyError,
        ) as error:  # no files of a processor, or none for it
            message = f"a prompt has images, which the model in {directory} cannot be shown: {error}"
            raise DataError(message, path=directory) from error
        self._token = image_token(config)
        self.marker: str = self._processor.image_token
        """What the chat template writes in place of an image."""
        self._count = lru_cache(maxsize=CACHED_IMAGES)(self._count_uncached)

    def encode(
        self, text: str, images: Sequence[bytes], *, add_special_tokens: bool
    ) -> tuple[IntArray, tuple[PlacedImage, ...]]:
        """Return the tokens of a rendered text with a marker for each image, and the images' places in them."""
        tokens = self._process(text, images, add_special_tokens)
        places = np.flatnonzero(tokens == self._token)
        counts = [self._count(image) for image in images]
        if sum(counts) != len(places):
            raise DataError(
                f"a prompt with {len(images)} images has {len(places)} tokens for them, and the processor makes "
                f"{counts} of each by itself"
            )
        ends = np.cumsum([0, *counts])
        placed = [
            PlacedImage(image, int(places[start]), int(places[stop - 1]) + 1)
            for image, start, stop in zip(images, ends[:-1], ends[1:], strict=True)
        ]
        return tokens, tuple(placed)

    def _count_uncached(self, image: bytes) -> int:
        """Return how many tokens stand for an image."""
        return int((self._process(self.marker, [image], False) == self._token).sum())

    def _process(self, text: str, images: Sequence[bytes], add_special_tokens: bool) -> IntArray:
        try:
            for image in images:
                check_image(image)  # all headers, before any of them takes memory
            opened = [open_image(image) for image in images]
            found = self._processor(text=[text], images=[opened], add_special_tokens=add_special_tokens)
        except Exception as error:  # named boundary: processors refuse some images, each with errors of its own
            raise DataError(f"the model cannot be shown the images of a prompt: {error}") from error
        tokens = np.asarray(found["input_ids"][0], np.int32)
        tokens.setflags(write=False)
        return tokens
