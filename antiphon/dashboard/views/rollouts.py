"""The page of a run's rollouts: browse, filter and search attempts."""

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from antiphon.core.types import AttemptStatus
from antiphon.dashboard.cards import RunCard, require_attempts
from antiphon.dashboard.errors import RequestError
from antiphon.dashboard.params import Params
from antiphon.dashboard.site import Site

ROWS = 50
MOST_PAGES = 200
MOST_COUNTED = 10_000  # matches; more are not counted
MOST_SCORES = 5_000  # of which the histogram is made
BINS = 20
FEW = 5_000  # attempts that match a filter and are looked up one by one
MOST_MATCHES = 20_000  # of a search, if they are not in the order of the search
SORTS = {
    "newest": "a.lineage DESC, a.grp DESC, a.sibling DESC, a.try DESC",
    "best": "a.score DESC",
    "worst": "a.score",
    "longest": "a.tokens DESC",
    "shortest": "a.tokens",
    "oldest": "a.age DESC",
}
KNOWN = {"best": "score", "worst": "score", "longest": "tokens", "shortest": "tokens", "oldest": "age"}
STATUS = "a.status = ?"
RANGES = {
    "step": ("a.step = ?", int),
    "group": ("a.grp = ?", int),
    "lineage": ("a.lineage = ?", int),
    "age": ("a.age = ?", int),
    "score_min": ("a.score >= ?", float),
    "score_max": ("a.score <= ?", float),
    "tokens_min": ("a.tokens >= ?", int),
    "tokens_max": ("a.tokens <= ?", int),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One attempt in a list.

    Attributes:
        id: `lineage:group.sibling.try`.
        step: Step that trained on it.
        task: Its task.
        prompt: Id of its prompt.
        status: What became of it.
        score: Its score.
        tokens: Sampled tokens.
        age: Versions between its start and the step that trained on it.
        seconds: From its start to its score.
        failure: The reason why it failed.
        question: End of its prompt's text; empty until it is indexed.
        answer: Begin of its response's text; empty until it is indexed.
    """

    id: str
    step: int | None
    task: str
    prompt: str
    status: str
    score: float | None
    tokens: int | None
    age: int | None
    seconds: float | None
    failure: str | None
    question: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsPage:
    """The attempts of a run that match a filter.

    Attributes:
        card: The run.
        rows: One page of them.
        found: Number of matches; at most 10,001, which stands for more.
        statuses: Number of attempts of each status in the run.
        tasks: Number of attempts of each task in the run.
        flags: Number of attempts with each flag of reward hacking, among those whose texts are read.
        scores: Histogram of the scores of the newest 5,000 matches: begin, end and number of each bin.
        copied: Share of the run's attempts in the index.
        searchable: Share of its files whose texts can be searched.
        problem: The reason why texts cannot be read; empty if they can.
        page: Number of the page, from 0.
        sort: Order of the rows.
    """

    card: RunCard
    rows: list[AttemptRow]
    found: int
    statuses: dict[str, int]
    tasks: dict[str, int]
    flags: dict[str, int]
    scores: list[tuple[float, float, int]]
    copied: float
    searchable: float
    problem: str
    page: int
    sort: str


def query_rollouts(site: Site, params: Params) -> RolloutsPage:
    """Return the attempts of a run that match the filters, by `sort`.

    Filters are `step`, `group`, `lineage`, `age`, `task`, `status`, `score_min`, `score_max`, `tokens_min`, `tokens_max`,
    `flag`, a flag of reward hacking, and `q`, a full-text search: all words, or a phrase in double quotes.
    """
    run = site.folder.find(params.name)
    require_attempts(site.read_card(params.name))
    page = params.integer("page", 0) or 0
    if not 0 <= page < MOST_PAGES:
        raise RequestError(f"page: {page} is not valid; valid are 0 to {MOST_PAGES - 1}; narrow the filter instead")
    sort = params.choice("sort", list(SORTS), "newest")
    filters = list(_read_filters(params))
    match = make_match(words) if (words := params.text("q")) else ""
    progress = site.index.refresh(run)
    copied, searchable = 1.0 if progress.is_complete else progress.attempts, progress.texts  # before the rows are read
    with closing(site.index.open(run)) as db:
        source, where, values = _make_condition(db, filters, match, sort)
        order = SORTS[sort] if sort != "newest" or not match else "texts.rowid DESC"
        rows = db.execute(
            f"SELECT a.*, p.prompt AS question, p.response AS answer FROM {source}"
            f" LEFT JOIN previews p ON p.row = a.row WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?",
            (*values, ROWS, page * ROWS),
        ).fetchall()
        # Any index may find the matches that are counted, if neither the search nor a filter leaves few.
        unordered = where if match or " IN (" in where else where.replace("+a.", "a.")
        counted = f"SELECT count(*) FROM (SELECT 1 FROM {source} WHERE {unordered} LIMIT {MOST_COUNTED + 1})"
        (found,) = db.execute(counted, values).fetchone()
        facets = db.execute("SELECT value FROM meta WHERE key = 'facets'").fetchone()
        known = json.loads(facets["value"]) if facets else {"status": {}, "task": {}}
        scores = _read_histogram(db, source, where, values)
        flags = dict(db.execute("SELECT flag, count(*) FROM flags GROUP BY flag ORDER BY 2 DESC LIMIT 200").fetchall())
    return RolloutsPage(
        card=site.read_card(params.name),
        rows=[_make_row(row) for row in rows],
        found=found,
        statuses=known["status"],
        tasks=known["task"],
        flags=flags,
        scores=scores,
        copied=copied,
        searchable=searchable,
        problem=progress.problem,
        page=page,
        sort=sort,
    )


def _read_filters(params: Params) -> Iterator[tuple[str, object]]:
    """Yield the condition of each filter and its value."""
    for key, (condition, kind) in RANGES.items():
        value = params.integer(key) if kind is int else params.number(key)
        if value is not None:
            yield condition, value
    if status := params.choice("status", [each.value for each in AttemptStatus]):
        yield STATUS, status
    if task := params.text("task"):
        yield "a.task = ?", task
    if flag := params.text("flag"):
        yield "a.row IN (SELECT row FROM flags WHERE flag = ?)", flag


def _make_condition(
    db: sqlite3.Connection, filters: list[tuple[str, object]], match: str, sort: str
) -> tuple[str, str, list[object]]:
    """Return the tables, the condition and its values of a query for attempts."""
    values = [value for _, value in filters]
    are_few = [_has_few(db, condition, value) for condition, value in filters]
    conditions = ["1"]
    for (condition, _), is_few in zip(filters, are_few, strict=True):
        # Few attempts are looked up. Of many, the order of the rows finds the first ones sooner: a plus sign keeps SQLite
        # from an index. Each status has indices of its own in the other orders.
        is_ordered = condition == STATUS and sort in KNOWN and not match and not any(are_few)
        found = condition if is_ordered else f"+{condition}"
        conditions.append(f"a.row IN (SELECT a.row FROM attempts a WHERE {condition})" if is_few else found)
    if sort in KNOWN:
        conditions.append(f"a.{KNOWN[sort]} IS NOT NULL")
    if not match:
        return "attempts a", " AND ".join(conditions), values
    if sort != "newest":
        found = f"SELECT rowid FROM texts WHERE texts MATCH ? ORDER BY rowid DESC LIMIT {MOST_MATCHES}"
        return "attempts a", " AND ".join([*conditions, f"a.row IN ({found})"]), [*values, match]
    # CROSS JOIN keeps the order: matches come from the search, newest first, and are looked up one by one.
    source = "texts CROSS JOIN attempts a ON a.row = texts.rowid"
    return source, " AND ".join(["texts MATCH ?", *conditions]), [match, *values]


def _has_few(db: sqlite3.Connection, condition: str, value: object) -> bool:
    query = f"SELECT count(*) FROM (SELECT 1 FROM attempts a WHERE {condition} LIMIT {FEW + 1})"
    count: int = db.execute(query, (value,)).fetchone()[0]
    return count <= FEW


def make_match(words: str) -> str:
    """Return a query of full-text search that finds all words; text in double quotes is a phrase, and nothing is syntax."""
    terms = [phrase or word for phrase, word in re.findall(r'"([^"]*)"|([^\s"]+)', words)]
    terms = [term.replace("\0", " ") for term in terms if any(each.isalnum() for each in term)]
    if not terms:
        raise RequestError("q: the search needs a word or a number")
    return " ".join(f'"{term}"' for term in terms[:32])


def _make_row(row: sqlite3.Row) -> AttemptRow:
    names = ("step", "task", "prompt", "status", "score", "tokens", "age", "seconds", "failure")
    attempt = f"{row['lineage']}:{row['grp']}.{row['sibling']}.{row['try']}"
    fields: dict[str, Any] = {name: row[name] for name in names}
    return AttemptRow(id=attempt, question=row["question"] or "", answer=row["answer"] or "", **fields)


def _read_histogram(
    db: sqlite3.Connection, source: str, where: str, values: list[object]
) -> list[tuple[float, float, int]]:
    rows = source.replace("attempts a", "attempts a NOT INDEXED")  # an index of scores would find the lowest ones first
    newest = "texts.rowid DESC" if source.startswith("texts") else "a.row DESC"
    query = f"SELECT a.score FROM {rows} WHERE {where} AND a.score IS NOT NULL ORDER BY {newest} LIMIT {MOST_SCORES}"
    scores = np.array([row[0] for row in db.execute(query, values)], np.float64)
    scores = scores[np.isfinite(scores)]
    if len(scores) < 2 or scores.min() == scores.max():
        return []
    counts, edges = np.histogram(scores, bins=BINS)
    return [
        (float(begin), float(end), int(count)) for begin, end, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
