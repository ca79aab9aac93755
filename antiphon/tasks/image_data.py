"""Images in the rows of a data set: reading them, and giving each message those that it names."""

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from antiphon.core.errors import DataError, RequestError
from antiphon.core.image_checks import check_image
from antiphon.core.types import IMAGE_MARKER, Message

MakeError = Callable[[str], DataError]  # names the row and column


def join_parts(parts: Sequence[Any], error: MakeError) -> str:
    """Return the content of a message that is a list of texts and images, as a text with markers."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if part == {"type": "image"}:
            texts.append(IMAGE_MARKER)
        elif kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise error(
                f"a part of a message is {{'type': 'text', 'text': …}} or {{'type': 'image'}}, whose image is in the column of "
                f"images, not {part!r:.80}"
            )
    return "".join(texts)


def place_images(messages: Sequence[Message], images: Sequence[bytes], error: MakeError) -> tuple[Message, ...]:
    """Give each message the images whose markers it has, in order; the error if their numbers differ."""
    markers = [message.content.count(IMAGE_MARKER) for message in messages]
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
        value: An image, or a list of images: bytes, a mapping with `bytes` or `path`, a data URL, a path, or an image of
            Pillow, which becomes a PNG file.
        directory: Of the data set. Paths must lead to a file in it.
        error: Makes the error for an image that cannot be read.
    """
    files = []
    for each in value if isinstance(value, list | tuple) else [value]:
        try:
            files.append(_read(each, directory))
            check_image(files[-1])
        except (RequestError, OSError, ValueError) as reason:
            raise error(f"{reason}") from reason
    return tuple(files)


def _read(value: Any, directory: Path) -> bytes:
    """Return the file of an image; `ValueError` or `OSError` with the reason if there is none."""
    if hasattr(value, "save"):  # an image of Pillow, as `datasets` decodes them
        value.convert("RGB").save(file := io.BytesIO(), format="png")
        return file.getvalue()
    content = next(_choices(value), None)
    if content is None:
        raise ValueError(
            f"an image is bytes, a mapping with 'bytes' or 'path', a data URL or a path, not {value!r:.80}"
        )
    if isinstance(content, bytes):
        return content
    if content.startswith("data:"):
        try:
            return base64.b64decode(content.partition(",")[2], validate=True)
        except ValueError as reason:
            raise ValueError(f"the data URL {content[:40]!r}… is not base64: {reason}") from reason
    path = (directory / content).resolve()
    if not path.is_relative_to(directory.resolve()) or not path.is_file():
        raise ValueError(f"the image {content!r} is no file in {directory}")
    return path.read_bytes()


def _choices(value: Any) -> Iterator[bytes | str]:
    """Yield what a value offers as an image, the best first."""
    for each in (value.get("bytes"), value.get("path")) if isinstance(value, Mapping) else (value,):
        if isinstance(each, bytes | str) and each:
            yield each
