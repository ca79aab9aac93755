"""Notes and tags that a person gives to a run, in a file of their own. Nothing that runs or proves a run reads them."""

import json
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from antiphon.core.errors import ConfigError, RecordError
from antiphon.record import safe_files
from antiphon.record.run_dir import fsync

FILE = "notes.json"
MOST_TEXT = 10_000  # characters
MOST_TAGS, LONGEST_TAG = 20, 40
MOST_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Notes:
    """Tags of a run, sorted, and a text about it."""

    tags: tuple[str, ...] = ()
    text: str = ""


def read_notes(run: Path) -> Notes:
    """Return the notes of a run; empty if it has none. Raise `RecordError` if the file cannot be read."""
    if not os.path.lexists(run / FILE):
        return Notes()
    found = safe_files.read_json(run, FILE, MOST_BYTES)
    try:
        return make_notes(found["tags"], found["text"])
    except (ConfigError, TypeError, KeyError, AttributeError) as error:
        raise RecordError(f"{run / FILE} holds no notes: {error}", path=run / FILE) from error


def make_notes(tags: Iterable[str], text: str) -> Notes:
    """Return checked notes.

    Args:
        tags: Up to 20 tags of 1 to 40 printable characters without commas; spaces around them do not count.
        text: Up to 10,000 characters.

    Raises:
        ConfigError: A tag or the text is not valid.
    """
    found = sorted({tag.strip() for tag in tags} - {""})
    for tag in found:
        if len(tag) > LONGEST_TAG or not tag.isprintable() or "," in tag:
            message = (
                f"{tag[:LONGEST_TAG]!r} is no tag; a tag has up to {LONGEST_TAG} printable characters and no comma"
            )
            raise ConfigError(message, key="tags", value=tag)
    if len(found) > MOST_TAGS:
        raise ConfigError(f"{len(found)} are too many; at most {MOST_TAGS} are valid", key="tags", value=len(found))
    text = text.replace("\r\n", "\n").strip()
    if len(text) > MOST_TEXT:
        message = f"{len(text):,} characters are too many; at most {MOST_TEXT:,} are valid"
        raise ConfigError(message, key="text", value=len(text))
    return Notes(tuple(found), text)


def write_notes(run: Path, tags: Iterable[str], text: str) -> Notes:
    """Replace the notes of a run and return them; empty ones remove the file.

    Raises:
        ConfigError: A tag or the text is not valid; see `make_notes`.
        RecordError: The directory holds no run, or cannot be written.
    """
    notes = make_notes(tags, text)
    safe_files.resolve_file(run, "config.yaml")
    path = run / FILE
    draft = run / f".{FILE}.{secrets.token_hex(8)}"
    try:
        if notes == Notes():
            path.unlink(missing_ok=True)
            fsync(run)
            return notes
        # A new file takes the place of the old one: if that is a link, what it leads to stays as it is.
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"tags": list(notes.tags), "text": notes.text}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        fsync(run)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise RecordError(f"{path} cannot be written: {error.strerror}", path=path) from error
    return notes
