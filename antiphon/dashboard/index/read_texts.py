"""Index the texts of recorded trajectories for full-text search, file by file, the newest first."""

import itertools
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from antiphon.core.errors import AntiphonError
from antiphon.dashboard.index.store import MOST_BYTES
from antiphon.inspect.token_texts import TokenTexts
from antiphon.record import safe_files
from antiphon.record.trajectories import SCHEMA

MOST_TOKENS = 16_384  # of a segment that are indexed
PREVIEW = 160  # characters
FLAG_PREFIX = "mark/"  # of the parts of a score that flag a response, as tasks name them
MOST_FLAGS = 32  # of an attempt
COMMIT_SECONDS = 0.5  # between two commits
NUMBERS = ("lineage", "grp", "sibling", "try")
COLUMNS = pa.schema([SCHEMA.field(name) for name in (*NUMBERS, "tokens", "loss_mask", "meta")])


def index_texts(
    index: sqlite3.Connection, run: Path, texts: TokenTexts, go_on: Callable[[float], bool] = lambda share: True
) -> int:
    """Index the files in `rollouts/` whose attempts are in the index and whose texts are not.

    Args:
        index: The index, open for writing.
        run: The run directory.
        texts: Its tokenizer.
        go_on: Called with the share of files that is done before each file; False ends the work.

    Returns:
        The number of files that were indexed.
    """
    done = {row[0] for row in index.execute("SELECT file FROM files")}
    known = [row[0] for row in index.execute("SELECT DISTINCT file FROM attempts WHERE file IS NOT NULL")]
    missing = sorted(set(known) - done, key=_order, reverse=True)
    count, committed = 0, time.monotonic()
    for file in missing:
        if not go_on((len(known) - len(missing) + count) / len(known)) or _size(index) > MOST_BYTES:
            break
        found = 0
        with suppress(AntiphonError):  # the page of an attempt names the damage
            for row, prompt, response, text, meta in _read_file(index, run, file, texts):
                index.execute("INSERT OR REPLACE INTO previews VALUES (?, ?, ?)", (row, prompt, response))
                index.execute("INSERT INTO texts (rowid, text) VALUES (?, ?)", (row, text))
                flags = [(flag, row) for flag in _read_flags(meta)]
                index.executemany("INSERT OR IGNORE INTO flags VALUES (?, ?)", flags)
                found += 1
        index.execute("INSERT INTO files VALUES (?, ?)", (file, found))
        count += 1
        if time.monotonic() > committed + COMMIT_SECONDS:  # each commit writes a segment of the search
            index.commit()
            committed = time.monotonic()
    index.commit()
    return count


def _order(file: str) -> tuple[int, str]:
    digits = file.removesuffix(".parquet").rpartition("-")[2]
    return (int(digits) if digits.isdigit() else 0, file)


def _size(index: sqlite3.Connection) -> int:
    (pages,), (size,) = (index.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
    return int(pages * size)


def _read_file(
    index: sqlite3.Connection, run: Path, file: str, texts: TokenTexts
) -> Iterator[tuple[int, str, str, str, str]]:
    """Yield row in the index, previews of prompt and response, text, and facts as JSON of each trajectory of a file."""
    path = safe_files.resolve_file(run, f"rollouts/{file}")
    query = "SELECT row FROM attempts WHERE lineage = ? AND grp = ? AND sibling = ? AND try = ?"
    # Segments of an attempt are neighbours.
    for attempt, segments in itertools.groupby(_read_segments(path, texts), key=lambda each: each[0]):
        _, prompts, responses, metas = zip(*segments, strict=True)
        parts = list(zip(prompts, responses, strict=True))
        row = index.execute(query, attempt).fetchone()
        if row is not None and not index.execute("SELECT 1 FROM previews WHERE row = ?", row).fetchone():
            prompt, response = parts[0]
            text = "\n".join(f"{before}\n{after}" for before, after in parts)
            yield row[0], prompt[-PREVIEW:], response[:PREVIEW], text.replace("\0", " "), metas[0]


def _read_flags(meta: str) -> list[str]:
    """Return the flags of reward hacking of a response, from the facts about its attempt as JSON."""
    if f'"{FLAG_PREFIX}' not in meta:  # as almost always
        return []
    try:
        parts = json.loads(meta)["score"]["parts"]
        return sorted(name.removeprefix(FLAG_PREFIX)[:100] for name in parts if name.startswith(FLAG_PREFIX))[
            :MOST_FLAGS
        ]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []


def _read_segments(path: Path, texts: TokenTexts) -> Iterator[tuple[tuple[int, ...], str, str, str]]:
    """Yield the numbers of its attempt, the text of the prompt and that of the rest, and facts as JSON of each segment."""
    for batch in safe_files.iterate_batches(path, COLUMNS):
        with safe_files.convert_read_errors(path):
            numbers = list(zip(*(batch.column(name).to_pylist() for name in NUMBERS), strict=True))
            tokens, masks, facts = (batch.column(name) for name in ("tokens", "loss_mask", "meta"))
            for place, attempt in enumerate(numbers):
                ids, mask = (each[place].values[:MOST_TOKENS].to_pylist() for each in (tokens, masks))
                begin = mask.index(True) if True in mask else len(ids)
                yield attempt, texts.decode(ids[:begin]), texts.decode(ids[begin:]), facts[place].as_py() or ""
