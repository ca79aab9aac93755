"""Bytes of a file as text of JSON, bit by bit: the event loop does other things between two bits."""

import asyncio
import codecs
import encodings
import json
import pkgutil
import sys
from encodings import normalize_encoding
from encodings.aliases import aliases

from antiphon.sandbox.service.http_errors import Reason, Refused

BIT = 1 << 14  # bytes that are decoded at once, which takes milliseconds with the slowest codec
# For each, what is not finished is decoded again with the next bit: of some texts that is everything so far.
_UNBOUNDED = {"utf_7", "unicode_escape", "raw_unicode_escape", "idna", "punycode", "undefined"}
_OTHERS = {"aliases", "mbcs", "oem"}  # no codec, and those of Windows
# A name that Python does not know it would look for on disk, and keep for ever.
ENCODINGS = {module.name for module in pkgutil.iter_modules(encodings.__path__)} - _UNBOUNDED - _OTHERS
# Without one of these marks a text has the byte order of the machine; what decodes bit by bit must be told so.
_MARKS = {"utf_16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf_32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)}
ERRORS = ("strict", "ignore", "replace", "backslashreplace", "surrogateescape")


def _decoder(content: bytes, encoding: str, errors: str) -> codecs.IncrementalDecoder:
    name = normalize_encoding(encoding).lower()
    name = aliases.get(name, name)
    if name not in ENCODINGS or not codecs.lookup(name)._is_text_encoding:
        raise Refused(Reason.INPUT, f"encoding: {encoding!r} is no encoding of text that files are read in")
    if errors not in ERRORS:
        raise Refused(Reason.INPUT, f"errors: {errors!r} is none of {', '.join(ERRORS)}")
    if name in _MARKS and not content.startswith(_MARKS[name]):
        name += f"_{sys.byteorder[0]}e"
    return codecs.getincrementaldecoder(name)(errors)


async def text_as_json(content: bytes, encoding: str, errors: str) -> list[bytes]:
    """The literal of JSON, in ASCII and in parts, for a file's text. `Refused` for what cannot be decoded."""
    decoder, parts = _decoder(content, encoding, errors), [b'"']
    try:
        for at in range(0, len(content), BIT):
            parts.append(_inside(decoder.decode(content[at : at + BIT])))
            await asyncio.sleep(0)
        parts.append(_inside(decoder.decode(b"", final=True)))
    except ValueError as error:
        raise Refused(Reason.INPUT, f"it cannot be read as {encoding}: {error}") from error
    return [*parts, b'"']


def _inside(text: str) -> bytes:
    return json.dumps(text)[1:-1].encode("ascii")
