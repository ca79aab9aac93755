"""Decodes a file to a JSON string in chunks, so that the event loop can do other work in between."""

import asyncio
import codecs
import encodings
import json
import pkgutil
import sys
from encodings import normalize_encoding
from encodings.aliases import aliases

from antiphon.sandbox.service.http_errors import Reason, RefusedError

CHUNK = 1 << 14  # bytes decoded at once, which takes milliseconds with the slowest codec
# These decode an unfinished sequence again with the next chunk; in some texts, that is everything so far.
_UNBOUNDED = {"utf_7", "unicode_escape", "raw_unicode_escape", "idna", "punycode", "undefined"}
_OTHERS = {"aliases", "mbcs", "oem"}  # not codecs, or codecs of Windows only
# Python would search the disk for an unknown name, and cache the result for ever.
ENCODINGS = {module.name for module in pkgutil.iter_modules(encodings.__path__)} - _UNBOUNDED - _OTHERS
# A text without one of these marks has the byte order of the machine; an incremental decoder must be told so.
_MARKS = {"utf_16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf_32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)}
ERRORS = ("strict", "ignore", "replace", "backslashreplace", "surrogateescape")


def _make_decoder(content: bytes, encoding: str, errors: str) -> codecs.IncrementalDecoder:
    name = normalize_encoding(encoding).lower()
    name = aliases.get(name, name)
    if name not in ENCODINGS or not codecs.lookup(name)._is_text_encoding:
        raise RefusedError(Reason.INPUT, f"encoding: {encoding!r} is not a supported text encoding")
    if errors not in ERRORS:
        raise RefusedError(Reason.INPUT, f"errors: {errors!r} is not valid; valid are {', '.join(ERRORS)}")
    if name in _MARKS and not content.startswith(_MARKS[name]):
        name += f"_{sys.byteorder[0]}e"
    return codecs.getincrementaldecoder(name)(errors)


async def text_as_json(content: bytes, encoding: str, errors: str) -> list[bytes]:
    """Return a file's text as a JSON string literal, in ASCII parts.

    Raises:
        RefusedError: The content cannot be decoded.
    """
    decoder, parts = _make_decoder(content, encoding, errors), [b'"']
    try:
        for at in range(0, len(content), CHUNK):
            parts.append(_json_characters(decoder.decode(content[at : at + CHUNK])))
            await asyncio.sleep(0)
        parts.append(_json_characters(decoder.decode(b"", final=True)))
    except ValueError as error:
        raise RefusedError(Reason.INPUT, f"the file cannot be decoded as {encoding}: {error}") from error
    return [*parts, b'"']


def _json_characters(text: str) -> bytes:
    return json.dumps(text)[1:-1].encode("ascii")
