"""1 for a query that finds what the right one finds, else 0: both are executed, in SQLite.

A query may read and nothing else, as SQLite's authorizer sees it, leaves nothing to chance, and has so many steps of SQLite's
virtual machine and so much memory. Steps are counted, not seconds, so that a verdict does not depend on the machine; the
grading pool's deadline stands behind them.
"""

import itertools
import re
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from antiphon.core.types import Prompt, Score
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.extract import ground_truth, zero_score
from antiphon.tasks.rewards.fences import last_block

Row = tuple[Any, ...]

MEMORY = 64 << 20  # bytes, of all of SQLite in the process
LONGEST = 1 << 16  # bytes of a query
# Bytes of one value in a query, or as many as the script has: a step takes longer the longer they are.
LONGEST_VALUE = 1 << 12
MOST_ORDERS = 20_000  # rows that are compared to find the order of columns, beside those that a right query needs
LONGEST_PATTERN = 100  # bytes, of LIKE and GLOB
_STEPS_AT_ONCE = 1000

_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_DENIED = frozenset({"random", "randomblob", "load_extension", "fts3_tokenizer"})
# One step of these takes as long as the width in the format says. They are allowed where the right query uses them.
_FORMATTING = frozenset({"printf", "format"})

_TAGS = frozenset(
    {"sql", "sqlite", "sqlite3", "mysql", "mariadb", "postgresql", "postgres", "psql", "tsql", "plsql", "duckdb"}
)
_TOKEN = re.compile(
    r"""'(?:[^']|'')*+'|"(?:[^"]|"")*+"|`[^`]*+`|\[[^\]]*+\]|--[^\n]*+|/\*.*?\*/|[()]|\w++|\S""", re.DOTALL
)


class WrongQueryError(Exception):
    """A query fails, is not allowed, or finds too many rows."""


def sql(
    prompt: Prompt,
    transcript: Transcript,
    *,
    answer: str = "query",
    databases: str = "databases",
    columns_in_order: bool = True,
    steps: int = 1_000_000,
    rows: int = 10_000,
) -> Score:
    """Return 1 if the response's query finds the same rows as the payload's `answer` in each of the payload's `databases`.

    The query is the last code block of SQL in the response, else the last without a language, or all of the response. A
    database is a script that makes tables and rows; several, with different rows, tell a right query from one that is right by
    luck. Rows are compared as a multiset, in order only if the right query orders them at its top level, where ties are in the
    order of the right query. Columns are compared in order whatever their names, or with `columns_in_order: false` in the best
    order. Numbers are compared to 9 digits. A query that does not run, takes more than `steps` or finds more than `rows` earns
    0. The part `databases` is the share of databases in which the query is right.

    Raises:
        ValueError: The right query or a script fails, or the right query finds nothing in any database.
    """
    right, scripts = ground_truth(prompt, answer), _scripts(prompt, databases)
    query = (last_block(transcript.response, _TAGS) or transcript.response).strip()
    ordered = orders(right)
    denied = _DENIED | (_FORMATTING - {token.lower() for token in _TOKEN.findall(right)})
    matches, found_any, problem = [], False, ""
    for number, script in enumerate(scripts):
        with closing(_database(script, prompt, number)) as database:
            database.set_authorizer(partial(_authorize, denied))
            try:
                expected = _find(database, right, steps, rows)
            except WrongQueryError as error:
                raise ValueError(f"prompt {prompt.id}, database {number}: the right query fails: {error}") from None
            found_any = found_any or bool(expected)
            try:
                found = [] if problem else _find(database, query, steps, rows)
                matches.append(same(expected, found, ordered, columns_in_order))
            except WrongQueryError as error:
                matches.append(False)
                problem = str(error)
    if not found_any:
        raise ValueError(f"prompt {prompt.id}: the right query finds nothing in any database, as a wrong one may")
    if problem:
        return zero_score(problem)
    return Score.of(all(matches), databases=sum(matches) / len(matches))


def _scripts(prompt: Prompt, key: str) -> list[str]:
    found = prompt.payload.get(key) if isinstance(prompt.payload, Mapping) else None
    scripts = [found] if isinstance(found, str) else list(found or [])
    if not scripts:
        raise ValueError(f"the payload of prompt {prompt.id} has no {key!r}")
    return scripts


def _database(script: str, prompt: Prompt, number: int) -> sqlite3.Connection:
    database = sqlite3.connect(":memory:")
    try:
        database.execute(f"PRAGMA hard_heap_limit = {MEMORY}")
        database.execute("PRAGMA temp_store = MEMORY")
        database.executescript(script)
        database.commit()
    except (sqlite3.Error, MemoryError) as error:
        database.close()
        raise ValueError(f"prompt {prompt.id}, database {number} cannot be made: {error}") from None
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, max(LONGEST_VALUE, len(script.encode())))
    database.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, LONGEST)
    database.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, LONGEST_PATTERN)
    return database


def _authorize(denied: Collection[str], action: int, table: str | None, name: str | None, *_: str | None) -> int:
    allowed = action in _READING or (action == sqlite3.SQLITE_FUNCTION and str(name).lower() not in denied)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _find(database: sqlite3.Connection, query: str, steps: int, rows: int) -> list[Row]:
    """The rows of a query; numbers to 9 digits."""
    left = itertools.count(steps // _STEPS_AT_ONCE, -1)
    database.set_progress_handler(lambda: next(left) <= 0, _STEPS_AT_ONCE)
    try:
        with closing(database.execute(query)) as cursor:
            found = cursor.fetchmany(rows + 1)
            if cursor.description is None:
                raise WrongQueryError("the query finds no rows, nor could it")
    except (sqlite3.Error, sqlite3.Warning, MemoryError, ValueError) as error:
        raise WrongQueryError(f"{type(error).__name__}: {error}") from None
    if len(found) > rows:
        raise WrongQueryError(f"the query finds more than {rows} rows")
    return [tuple(float(f"{value:.9g}") if isinstance(value, float) else value for value in row) for row in found]


def orders(query: str) -> bool:
    """Return True if a query orders its rows at the top level, so that their order is a part of the answer."""
    depth, before = 0, ""
    for token in _TOKEN.findall(query):
        depth += {"(": 1, ")": -1}.get(token, 0)
        if depth == 0 and (before, token.lower()) == ("order", "by"):
            return True
        before = before if token.startswith(("--", "/*")) else token.lower()
    return False


def same(expected: Sequence[Row], found: Sequence[Row], ordered: bool, columns_in_order: bool) -> bool:
    """Return True if two results are the same rows."""
    width = len(expected[0]) if expected else 0
    if len(expected) != len(found) or (found and len(found[0]) != width):
        return False
    if columns_in_order:
        return list(expected) == list(found) if ordered else Counter(expected) == Counter(found)
    tries = itertools.count(2 * width * width + MOST_ORDERS // max(1, len(found)), -1)
    return _permuted(expected, found, ordered, (), tries)


def _permuted(
    expected: Sequence[Row], found: Sequence[Row], ordered: bool, chosen: tuple[int, ...], tries: Iterator[int]
) -> bool:
    """Return True if an order of the columns of `found` that begins with `chosen` gives the same rows."""
    if next(tries) < 0:
        raise WrongQueryError("the columns match in too many orders")
    width = len(expected[0]) if expected else 0
    theirs, ours = [row[: len(chosen)] for row in expected], [tuple(row[i] for i in chosen) for row in found]
    if not (theirs == ours if ordered else Counter(theirs) == Counter(ours)):
        return False
    left = {tuple(row[place] for row in found): place for place in range(width) if place not in chosen}
    return not left or any(_permuted(expected, found, ordered, (*chosen, place), tries) for place in left.values())
