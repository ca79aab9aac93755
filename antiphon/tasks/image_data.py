"""Images in the rows of a data set: reading them, and giving each message those that it names."""

import base64
import binascii
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from antiphon.core.errors import DataError
from antiphon.core.types import IMAGE_MARKER, Message

MakeError = Callable[[str], DataError]  # names the row and column


def join_parts(parts: Sequence[Any], error: MakeError) -> str:
    """Return the content of a message that is a list of texts and images, as a text with markers."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "image":
            texts.append(IMAGE_MARKER)
        elif kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise error(
                f"a part of a message is {{'type': 'text', 'text': …}} or {{'type': 'image'}}, not {part!r:.80}"
            )
    return "".join(texts)


def place_images(messages: Sequence[Message], images: Sequence[bytes], error: MakeError) -> tuple[Message, ...]:
    """Give each message the images whose markers it has, in order; the error if their numbers differ."""
    markers = [message.content.count(IMAGE_MARKER) for message in messages]
    if not images:
        return tuple(messages)
    if sum(markers) != len(images):
        found = f"it has {sum(markers)} times {IMAGE_MARKER}, where an image is to stand"
        raise error(f"{found}, and the row has {len(images)} images")
    left = iter(images)
    return tuple(
        replace(message, images=tuple(next(left) for _ in range(count)))
        for message, count in zip(messages, markers, strict=True)
    )


def read_images(value: Any, directory: Path, error: MakeError) -> tuple[bytes, ...]:
    """Return the files of the images of a row.

    Args:
        value: None, an image, or a list of images: bytes, a mapping with `bytes` or `path`, a data URL, a path, or an image of
            Pillow, which becomes a PNG file.
        directory: Where relative paths begin.
        error: Makes the error for an image that cannot be read.
    """
    if value is None:
        return ()
    return tuple(_read(each, directory, error) for each in (value if isinstance(value, list | tuple) else [value]))


def _read(value: Any, directory: Path, error: MakeError) -> bytes:
    if hasattr(value, "save"):  # an image of Pillow, as `datasets` decodes them
        value.save(file := io.BytesIO(), format="png")
        return file.getvalue()
    given = list(_choices(value))
    if not given:
        raise error(f"an image is bytes, a mapping with 'bytes' or 'path', a data URL or a path, not {value!r:.80}")
    content = given[0]
    if isinstance(content, bytes):
        return content
    if content.startswith("data:"):
        try:
            return base64.b64decode(content.partition(",")[2], validate=True)
        except binascii.Error as reason:
            raise error(f"the data URL {content[:40]!r}… is not base64: {reason}") from reason
    try:
        return (directory / content).read_bytes()
    except OSError as reason:
        raise error(f"the image {content!r} cannot be read: {reason}") from reason


def _choices(value: Any) -> Iterator[bytes | str]:
    """Yield what a value offers as an image, the best first."""
    for each in (value.get("bytes"), value.get("path")) if isinstance(value, Mapping) else (value,):
        if isinstance(each, bytes | str) and each:
            yield each
