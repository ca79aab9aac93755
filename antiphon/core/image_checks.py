"""Reading image files in memory with Pillow, within limits. Importing it imports no torch."""

import io
from typing import Any

from antiphon.core.errors import RequestError
from antiphon.core.optional_packages import import_optional

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # of Pillow's, those that start no other program
MOST_PIXELS = 1 << 24  # of an image
MOST_BYTES = 64 << 20  # of its file


def check_image(data: bytes) -> Any:
    """Return the image of Pillow in a file in memory, of which only the header is read yet.

    Raises:
        RequestError: It is no image, of another format, or too large.
    """
    pillow = import_optional("PIL.Image", "a prompt with images", package="pillow")
    try:
        if len(data) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        image = pillow.open(io.BytesIO(data), formats=FORMATS)
        if image.width * image.height > MOST_PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels are more than {MOST_PIXELS:,}")
    except Exception as error:  # named boundary: Pillow raises all kinds of errors for files that are damaged
        reason = "it is none of " + ", ".join(FORMATS) if type(error).__name__ == "UnidentifiedImageError" else error
        raise RequestError(f"an image of {len(data):,} bytes cannot be read: {reason}") from error
    return image


def open_image(data: bytes) -> Any:
    """Return the image of Pillow in a file in memory, upright and in RGB; `RequestError` as `check_image`."""
    operations = import_optional("PIL.ImageOps", "a prompt with images", package="pillow")
    image = check_image(data)
    try:
        return operations.exif_transpose(image).convert("RGB")
    except Exception as error:  # named boundary, as above
        raise RequestError(f"an image of {len(data):,} bytes cannot be read: {error}") from error
