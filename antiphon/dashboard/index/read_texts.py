"""Index the texts of recorded trajectories for full-text search, file by file, the newest first."""

import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
COLUMNS = pa.schema(
    [SCHEMA.field(name) for name in ("lineage", "grp", "sibling", "try", "segment", "tokens", "loss_mask", "meta")]
)


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
    count = 0
    for file in missing:
        if not go_on((len(known) - len(missing) + count) / len(known)) or _size(index) > MOST_BYTES:
            break
        try:
            found = list(_read_file(index, run, file, texts))
        except AntiphonError:
            found = []  # the page of an attempt names the damage
        index.executemany("INSERT OR REPLACE INTO previews VALUES (?, ?, ?)", [each[:3] for each in found])
        index.executemany("INSERT INTO texts (rowid, text) VALUES (?, ?)", [(each[0], each[3]) for each in found])
        flags = [(flag, row) for row, *_, meta in found for flag in _read_flags(meta)]
        index.executemany("INSERT OR IGNORE INTO flags VALUES (?, ?)", flags)
        index.execute("INSERT INTO files VALUES (?, ?)", (file, len(found)))
        index.commit()
        count += 1
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
    table = safe_files.read_table(path, COLUMNS)
    with safe_files.convert_read_errors(path):
        names = ("lineage", "grp", "sibling", "try", "segment")
        numbers = list(zip(*(table.column(name).to_pylist() for name in names), strict=True))
        tokens, masks, facts = (table.column(name) for name in ("tokens", "loss_mask", "meta"))
        metas: dict[tuple[Any, ...], str] = {}
        whole: dict[tuple[Any, ...], list[tuple[str, str]]] = {}
        for place, (*attempt, _) in enumerate(numbers):
            ids, mask = tokens[place].as_py()[:MOST_TOKENS], masks[place].as_py()[:MOST_TOKENS]
            begin = mask.index(True) if True in mask else len(ids)
            if tuple(attempt) not in metas:
                metas[tuple(attempt)] = facts[place].as_py()
            whole.setdefault(tuple(attempt), []).append((texts.decode(ids[:begin]), texts.decode(ids[begin:])))
    query = "SELECT row FROM attempts WHERE lineage = ? AND grp = ? AND sibling = ? AND try = ?"
    for attempt_id, parts in whole.items():
        row = index.execute(query, attempt_id).fetchone()
        if row is not None and not index.execute("SELECT 1 FROM previews WHERE row = ?", row).fetchone():
            prompt, response = parts[0]
            text = "\n".join(f"{before}\n{after}" for before, after in parts)
            yield row[0], prompt[-PREVIEW:], response[:PREVIEW], text.replace("\0", " "), metas[attempt_id]


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
