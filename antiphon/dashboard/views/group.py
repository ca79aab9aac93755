"""The page of a group: its siblings side by side, with the words in which they differ marked."""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from antiphon.core.errors import AntiphonError
from antiphon.core.types import Trajectory
from antiphon.dashboard.cards import RunCard, require_attempts
from antiphon.dashboard.errors import NotFoundError, RequestError
from antiphon.dashboard.params import Params
from antiphon.dashboard.site import Site
from antiphon.inspect.token_texts import TokenTexts
from antiphon.record import reader, safe_files, trajectories

MOST_SIBLINGS = 32
MOST_TOKENS = 1_500  # of a response
MOST_WORDS = 800  # that are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class SiblingText:
    """One attempt of a group.

    Attributes:
        id: `lineage:group.sibling.try`.
        status: What became of it.
        score: Its score.
        tokens: Sampled tokens; None if there is no trajectory.
        cut: Tokens of the response that are not shown.
        pieces: Its response: pieces of text, each with True if the sibling that it is compared with lacks it.
        problem: The reason why there is no text.
    """

    id: str
    status: str
    score: float | None
    tokens: int | None
    cut: int
    pieces: list[tuple[str, bool]]
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPage:
    """All attempts at one prompt; `reference` is the sibling that others are compared with, `more` how many are left out."""

    card: RunCard
    lineage: int
    group: int
    task: str
    prompt_id: str
    outcome: str
    step: int | None
    prompt: str
    siblings: list[SiblingText]
    reference: str
    more: int


def query_group(site: Site, params: Params) -> GroupPage:
    """Return the attempts of the group `group` of the lineage `lineage`, by default of the newest that has it."""
    run = site.folder.find(params.name)
    require_attempts(site.read_card(params.name))
    group, lineage = params.integer("group"), params.integer("lineage")
    if group is None:
        raise RequestError("group: the number of a group is needed")
    site.index.refresh(run)
    with reader.RunReader.open(run, check_pages=False) as record:
        rows = list(record.list_attempts(group, lineage=lineage))
    if not rows:
        raise NotFoundError(f"the run has no group {group}")
    rows = [row for row in rows if row.lineage == rows[-1].lineage]
    shown = rows[:MOST_SIBLINGS]
    try:
        texts: TokenTexts | None = site.index.token_texts(run)
    except AntiphonError:
        texts = None
    found = [_read(run, row, texts) for row in shown]
    with_text = [place for place, (_, response, *_) in enumerate(found) if response]
    chosen = max(with_text, key=lambda place: (_rank(shown[place]), -place), default=None)
    base = found[chosen][1] if chosen is not None else ""
    siblings = [_compare(row, *parts, base) for row, parts in zip(shown, found, strict=True)]
    first = rows[0]
    return GroupPage(
        card=site.read_card(params.name),
        lineage=first.lineage,
        group=group,
        task=first.prompt.task,
        prompt_id=first.prompt.id,
        outcome=first.outcome or "live",
        step=next((row.step for row in rows if row.step is not None), None),
        prompt=next((prompt for prompt, *_ in found if prompt), ""),
        siblings=siblings,
        reference=shown[chosen].name if chosen is not None else "",
        more=len(rows) - len(shown),
    )


def _rank(row: reader.AttemptRow) -> float:
    return float("-inf") if row.score is None else row.score


def _read(run: Path, row: reader.AttemptRow, texts: TokenTexts | None) -> tuple[str, str, int | None, int, str]:
    """Return prompt, response, number of sampled tokens, tokens that are cut, and the reason if there is no text."""
    if row.file is None:
        return "", "", None, 0, row.failure or "no trajectory on record"
    try:
        found = trajectories.read_attempt(safe_files.resolve_file(run, f"rollouts/{row.file}"), row.made_by)
    except AntiphonError as error:
        return "", "", None, 0, str(error)
    if found is None:
        return "", "", None, 0, f"rollouts/{row.file} does not have it"
    return _read_texts(found, texts)


def _read_texts(trajectory: Trajectory, texts: TokenTexts | None) -> tuple[str, str, int | None, int, str]:
    segment, meta = trajectory.segments[0], trajectory.meta
    tokens, mask = segment.tokens.tolist(), segment.loss_mask.tolist()
    begin = mask.index(True) if True in mask else len(tokens)
    decode = texts.decode if texts is not None else (lambda ids: " ".join(map(str, ids)))
    shown = tokens[begin : begin + MOST_TOKENS]
    cut = len(tokens) - begin - len(shown)
    return decode(tokens[max(begin - MOST_TOKENS, 0) : begin]), decode(shown), meta.completion_tokens, cut, ""


def _compare(
    row: reader.AttemptRow, prompt: str, response: str, tokens: int | None, cut: int, problem: str, base: str
) -> SiblingText:
    return SiblingText(
        id=row.name,
        status=row.status,
        score=row.score,
        tokens=tokens,
        cut=cut,
        pieces=mark_differences(base, response) if response else [],
        problem=problem,
    )


def mark_differences(base: str, text: str) -> list[tuple[str, bool]]:
    """Return a text in pieces, each with True if `base` lacks it; compared word by word."""
    ours, theirs = (re.findall(r"\s+|\w+|[^\w\s]", each)[:MOST_WORDS] for each in (text, base))
    rest = text[sum(map(len, ours)) :]
    pieces = []
    for kind, _, _, begin, end in difflib.SequenceMatcher(None, theirs, ours, autojunk=False).get_opcodes():
        if end > begin:
            pieces.append(("".join(ours[begin:end]), kind != "equal"))
    return [*pieces, (rest, False)] if rest else pieces
