"""The page of one attempt: its conversation token by token, its reward, and what became of it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from antiphon.core.errors import AntiphonError
from antiphon.core.types import AttemptId, Segment, Trajectory
from antiphon.dashboard.cards import RunCard, require_attempts
from antiphon.dashboard.coloring import LABELS, Coloring, Legend, list_colorings, make_coloring
from antiphon.dashboard.curves import Curve
from antiphon.dashboard.errors import NotFoundError, RequestError
from antiphon.dashboard.params import Params
from antiphon.dashboard.site import Site
from antiphon.inspect.causes import explain_status
from antiphon.record import reader, safe_files, token_stats, trajectories

MOST_TOKENS = 2_000  # of a page
MOST_SIBLINGS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token.

    Attributes:
        position: Its place in the segment.
        id: Its number in the vocabulary.
        text: The text that it adds; empty if later tokens complete its character.
        sampled: True if the policy sampled it.
        logprob: Log-prob with which it was sampled.
        version: Policy version that sampled it.
        level: Level of its colour, 0 to 9; None if it has none.
        value: The value that is coloured.
    """

    position: int
    id: int
    text: str
    sampled: bool
    logprob: float | None
    version: int | None
    level: int | None
    value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a conversation: its kind (prompt, response or observation), facts about its turn, and its tokens."""

    kind: str
    start: int
    stop: int
    facts: list[tuple[str, str]]
    tokens: list[Token]

    @property
    def text(self) -> str:
        """The whole text of the tokens that are shown."""
        return "".join(token.text for token in self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sibling:
    """Another attempt at the same prompt."""

    id: str
    status: str
    score: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPage:
    """One attempt.

    Attributes:
        card: The run.
        id: `lineage:group.sibling.try`.
        facts: What the ledger has of it.
        causes: Why it has its status, and what a step made of it.
        score: Its score.
        score_status: `scored`, `ungraded` or `infrastructure`; empty if it has no trajectory.
        score_parts: Parts of its score by name.
        score_detail: What the grader said.
        siblings: All attempts of its group, itself included.
        segments: Number of its segments.
        segment: The segment that is shown.
        length: Number of the segment's tokens.
        start: First token that is shown.
        stop: One past the last token that is shown.
        parts: The conversation in this range.
        color: What the colours of tokens mean.
        colorings: What they may mean.
        legend: The levels of the colours.
        signed: True if levels 0 to 4 are below 0, and levels 5 to 9 above.
        stats: Where the numbers of a step come from, or how to have them recorded; empty if no step trained on it.
        problem: The reason why there is no conversation; empty if there is one.
    """

    card: RunCard
    id: str
    status: str
    group: int
    lineage: int
    facts: list[tuple[str, str]]
    causes: list[tuple[str, str]]
    score: float | None
    score_status: str
    score_parts: dict[str, float]
    score_detail: str
    siblings: list[Sibling]
    segments: int
    segment: int
    length: int
    start: int
    stop: int
    parts: list[Part]
    color: str
    colorings: list[str]
    legend: list[Legend]
    signed: bool
    stats: str
    problem: str


def parse_attempt(name: str) -> tuple[int | None, AttemptId]:
    """Return lineage and numbers of `[lineage:]group.sibling.try`."""
    found = re.fullmatch(r"(?:(\d{1,9}):)?(-?\d{1,15})\.(\d{1,9})\.(\d{1,9})", name)
    if found is None:
        raise RequestError(f"id: {name!r:.80} names no attempt; it is written [lineage:]group.sibling.try")
    lineage, *numbers = found.groups()
    return int(lineage) if lineage else None, AttemptId(*map(int, numbers))


def query_attempt(site: Site, params: Params) -> AttemptPage:
    """Return the attempt `id`: tokens from `from` on of its segment `segment`, coloured by `color`."""
    run = site.folder.find(params.name)
    require_attempts(site.read_card(params.name))
    lineage, attempt = parse_attempt(params.text("id"))
    site.index.refresh(run)
    with reader.RunReader.open(run, check_pages=False) as record:
        row = record.find_attempt(attempt, lineage)
        if row is None:
            raise NotFoundError(f"the run has no attempt {params.text('id')}")
        siblings = record.list_siblings(row)[:MOST_SIBLINGS]
        causes = _explain(run, record, row)
        step = record.find_step(row.lineage, row.step)
    trajectory, problem = read_trajectory(run, row)
    number = params.integer("segment", 0) or 0
    stats, about = _read_stats(run, row, number, is_undone=step is not None and step.is_undone)
    view = _view_segment(site, params, trajectory, number, stats) if trajectory is not None else None
    score = trajectory.meta.score if trajectory is not None else None
    return AttemptPage(
        card=site.read_card(params.name),
        id=row.name,
        status=row.status,
        group=row.id.group,
        lineage=row.lineage,
        facts=list(_list_facts(row, trajectory)),
        causes=causes,
        score=row.score,
        score_status=score.status.value if score else "",
        score_parts=dict(list(score.parts.items())[:100]) if score else {},
        score_detail=score.detail if score else "",
        siblings=[Sibling(id=each.name, status=each.status, score=each.score) for each in siblings],
        segments=len(trajectory.segments) if trajectory else 0,
        segment=number,
        problem=problem or (view.problem if view else ""),
        length=view.length if view else 0,
        start=view.start if view else 0,
        stop=view.stop if view else 0,
        parts=view.parts if view else [],
        color=view.color if view else "",
        colorings=view.colorings if view else [],
        legend=view.legend if view else [],
        signed=view.signed if view else False,
        stats=about,
    )


@dataclass(frozen=True, slots=True)
class _SegmentView:
    length: int
    start: int
    stop: int
    parts: list[Part]
    color: str
    colorings: list[str]
    legend: list[Legend]
    signed: bool
    problem: str


def read_trajectory(run: Path, row: reader.AttemptRow) -> tuple[Trajectory | None, str]:
    """Return the trajectory of an attempt, and the reason if there is none."""
    if row.file is None:
        return None, "No trajectory is on record: the attempt was aborted while it ran, or it still runs."
    try:
        path = safe_files.resolve_file(run, f"rollouts/{row.file}")
        found = trajectories.read_attempt(path, row.made_by)
    except AntiphonError as error:
        return None, str(error)
    return found, "" if found is not None else f"rollouts/{row.file} does not have this attempt."


def _read_stats(run: Path, row: reader.AttemptRow, segment: int, *, is_undone: bool) -> tuple[dict[str, Curve], str]:
    """Return the numbers that a step recorded of a segment's tokens, and a sentence on where they come from."""
    if row.step is None:
        return {}, ""
    found: dict[str, Curve] = {}
    try:
        read = token_stats.read_segment(run, row.lineage, row.step, row.id, segment)
        found = {name: values.astype(np.float64) for name, values in read.items()}
    except AntiphonError as error:
        return {}, f"Numbers of its tokens cannot be read: {error}"
    names = [LABELS.get(name, name) for name in found]
    undone = ", which a resume has undone" if is_undone else ""
    sentences = [f"Of step {row.step}{undone}: {', '.join(names)}."] if found else []
    if missing := [name for name in token_stats.STATS if name not in found]:
        sentences.append(f"Not on record: {', '.join(missing)}; record.token_stats lists what a run writes.")
    return found, " ".join(sentences)


def _explain(run: Path, record: reader.RunReader, row: reader.AttemptRow) -> list[tuple[str, str]]:
    """Return the causes of an attempt's status, or the reason why they cannot be told."""
    try:
        with safe_files.convert_read_errors(run):
            return list(explain_status(record, row))
    except AntiphonError as error:
        return [("cause", f"it cannot be told: {error}")]


def _list_facts(row: reader.AttemptRow, trajectory: Trajectory | None) -> Iterator[tuple[str, str]]:
    yield "prompt", row.prompt.id
    yield "task", f"{row.prompt.task}, epoch {row.prompt.epoch}"
    yield "group", f"{row.id.group}, admitted at version {row.admitted}, {row.outcome or 'live'}"
    yield "started at", f"version {row.started}"
    if row.step is not None:
        yield "trained at", f"step {row.step}"
    if trajectory is not None:
        meta = trajectory.meta
        truncated = ", ended by a limit" if meta.truncated else ""
        yield "length", f"{meta.completion_tokens:,} sampled after {meta.prompt_tokens:,} of the prompt{truncated}"
        yield "turns", str(meta.turns)
        yield "seconds", f"{meta.timing.finished - meta.timing.queued:.3f}, grading included"
    if row.failure:
        yield "failure", row.failure
    if row.origin:
        yield "reused from", row.origin
    if row.file:
        yield "file", f"rollouts/{row.file}"


def _view_segment(
    site: Site, params: Params, trajectory: Trajectory, number: int, stats: Mapping[str, Curve]
) -> _SegmentView:
    if not 0 <= number < len(trajectory.segments):
        raise NotFoundError(f"segment: the attempt has segments 0 to {len(trajectory.segments) - 1}")
    segment = trajectory.segments[number]
    length = len(segment.tokens)
    start = min(max(params.integer("from", 0) or 0, 0), max(length - 1, 0))
    stop = min(start + MOST_TOKENS, length)
    colorings = list_colorings(segment, stats)
    color = params.choice("color", colorings)
    coloring = make_coloring(segment, stats, color)
    problem = ""
    try:
        texts = site.index.token_texts(site.folder.find(params.name)).split(segment.tokens[start:stop].tolist())
    except AntiphonError as error:
        problem, texts = f"Tokens are shown by their numbers: {error}", []
    if not texts:
        texts = [f"{token} " for token in segment.tokens[start:stop].tolist()]
    parts = list(_make_parts(segment, start, texts, coloring))
    legend, signed = (coloring.legend, coloring.signed) if coloring else ([], False)
    return _SegmentView(length, start, stop, parts, color, colorings, legend, signed, problem)


def _make_parts(segment: Segment, start: int, texts: list[str], coloring: Coloring | None) -> Iterator[Part]:
    """Yield the parts of a segment that lie in the range of `texts`."""
    stop = start + len(texts)
    for kind, begin, end, facts in _split_turns(segment):
        first, last = max(begin, start), min(end, stop)
        if first < last:
            tokens = [_make_token(segment, place, texts[place - start], coloring) for place in range(first, last)]
            yield Part(kind=kind, start=begin, stop=end, facts=facts, tokens=tokens)


def _split_turns(segment: Segment) -> Iterator[tuple[str, int, int, list[tuple[str, str]]]]:
    place = 0
    for turn in segment.turns:
        if turn.start > place:
            yield "observation" if place else "prompt", place, turn.start, []
        facts = [("ended by", str(turn.finish)), ("temperature", f"{turn.sampling.temperature:g}")]
        if turn.engines:
            facts.append(("engine", ", ".join(map(str, turn.engines))))
        if turn.reward is not None:
            facts.append(("reward", f"{turn.reward:g}"))
        facts.append(("waited", f"{turn.timing.started - turn.timing.queued:.3f} s"))
        facts.append(("took", f"{turn.timing.finished - turn.timing.started:.3f} s"))
        facts += [("tool call", str(call)[:500]) for call in turn.tool_calls[:20]]
        yield "response", turn.start, turn.stop, facts
        place = turn.stop
    if place < len(segment.tokens):
        yield ("observation" if place else "prompt"), place, len(segment.tokens), []


def _make_token(segment: Segment, place: int, text: str, coloring: Coloring | None) -> Token:
    sampled = bool(segment.loss_mask[place])
    value = coloring.values[place] if coloring is not None else np.nan
    return Token(
        position=place,
        id=int(segment.tokens[place]),
        text=text,
        sampled=sampled,
        logprob=float(segment.logprobs[place]) if sampled else None,
        version=int(segment.versions[place]) if sampled else None,
        level=coloring.level(place) if coloring is not None else None,
        value=float(value) if np.isfinite(value) else None,
    )
