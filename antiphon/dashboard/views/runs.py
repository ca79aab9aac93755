"""The page of all runs."""

from collections import Counter
from dataclasses import dataclass

from antiphon.dashboard.cards import STATES, RunCard
from antiphon.dashboard.params import Params
from antiphon.dashboard.site import Site

ROWS = 100  # of a page
MOST_TAGS = 200
SORTS = ("newest", "name", "reward", "accuracy", "gain", "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsPage:
    """The runs of the folder that match a filter.

    Attributes:
        runs: One page of them.
        found: Number of runs that match.
        total: Number of runs in the folder.
        states: Number of runs in each state.
        unread: Number of runs whose card is not read yet.
        folder: Name of the folder.
        page: Number of the page, from 0.
        pages: Number of pages.
        sort: Order of the rows.
        tags: Number of runs with each tag.
    """

    runs: list[RunCard]
    found: int
    total: int
    states: dict[str, int]
    unread: int
    folder: str
    page: int
    pages: int
    sort: str
    tags: dict[str, int]


def query_runs(site: Site, params: Params) -> RunsPage:
    """Return the runs that match `q` (in name, model, task, recipe, tag or note), `state` and `tag`, by `sort`."""
    words, state = params.text("q").lower().split(), params.choice("state", STATES)
    tag = params.text("tag")
    sort = params.choice("sort", SORTS, "newest")
    page = max(params.integer("page", 0) or 0, 0)
    cards = site.cards.read_all(site.folder.list_runs())
    counts = {each: sum(card.state == each for card in cards) for each in STATES}
    found = [card for card in cards if state in ("", card.state) and all(word in _search_text(card) for word in words)]
    found = [card for card in found if tag in ("", *card.tags)]
    found.sort(key=lambda card: _sort_key(card, sort))
    return RunsPage(
        runs=found[page * ROWS : (page + 1) * ROWS],
        found=len(found),
        total=len(cards),
        states={each: count for each, count in counts.items() if count},
        unread=counts["unread"],
        folder=site.folder.root.name,
        page=page,
        pages=-(-len(found) // ROWS),
        sort=sort,
        tags=dict(sorted(Counter(tag for card in cards for tag in card.tags).items())[:MOST_TAGS]),
    )


def _search_text(card: RunCard) -> str:
    return " ".join([card.name, card.model, card.recipe, card.note, *card.tasks, *card.tags]).lower()


def _sort_key(card: RunCard, sort: str) -> tuple[int, float | str]:
    """Return the key of a card, with those that lack the value at the end."""
    if sort == "name":
        return (0, card.name)
    if sort == "newest":
        return (0 if card.state == "running" else 1, "".join(chr(255 - ord(each)) for each in card.updated[:19]))
    gain = None
    if card.accuracy_after is not None and card.accuracy_before is not None:
        gain = card.accuracy_after - card.accuracy_before
    values = {"reward": card.reward, "accuracy": card.accuracy_after, "gain": gain, "seconds": card.seconds}
    value = values[sort]
    return (1, 0.0) if value is None else (0, -value)
