"""Problems that need tools: sums that are too long for the head, and questions whose answer is two documents away."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from antiphon.core.errors import ConfigError, DataError
from antiphon.core.rng import derive, generator
from antiphon.tasks.environments.bm25 import Index
from antiphon.tasks.environments.calculator import calculator
from antiphon.tasks.splits import SPLITS, split_of

Row = dict[str, Any]

PEOPLE = 40  # of a corpus; and as many towns, and half as many companies
SHARED = 50  # problems that share a corpus


def tool_problems(
    split: str, size: int = 1000, seed: int = 0, kinds: Sequence[str] = ("arithmetic", "lookup")
) -> Iterator[Row]:
    """`size` different problems of one split, of these kinds in turn. A row has the `answer`, and the `plan` of calls after
    which it is known. The question decides the split, so the splits share none."""
    if split not in SPLITS:
        raise DataError(f"tools has the splits {', '.join(SPLITS)}, not {split!r}")
    if not kinds or not set(kinds) <= set(KINDS):
        raise ConfigError(f"kinds={list(kinds)}: valid are {', '.join(KINDS)}")
    seen: set[str] = set()
    for number in range(100 * (size + 10)):
        if len(seen) == size:
            return
        row = KINDS[kinds[number % len(kinds)]](number, seed)
        if row["prompt"] not in seen and split_of(row["prompt"]) == split:
            seen.add(row["prompt"])
            yield row
    raise DataError(f"tools: {size} different {split} problems wanted, {len(seen)} found")


# --- arithmetic ----------------------------------------------------------------------------------------------------------

_SUMS = (
    (
        "A mill fills {a} sacks an hour for {b} hours, and loads them on carts of {c} sacks. How many sacks are left over?",
        ("{a} * {b}", "{0} % {c}"),
    ),
    (
        "A hall sells {a} seats at {b} crowns and {c} seats at {d} crowns, and pays {e} crowns for the band. How many crowns "
        "remain?",
        ("{a} * {b}", "{c} * {d}", "{0} + {1} - {e}"),
    ),
    (
        "A ship carries {a} crates of {b} bottles and {c} loose bottles. {d} bottles break, and the others are shared by {e} "
        "inns alike. How many bottles has each inn, if only whole bottles are given away?",
        ("{a} * {b} + {c}", "{0} - {d}", "{1} // {e}"),
    ),
)


def _arithmetic(number: int, seed: int) -> Row:
    random = generator(seed, "tools", "arithmetic", number)
    text, steps = _SUMS[int(random.integers(len(_SUMS)))]
    values = {
        name: int(random.integers(low, 10 * low)) for name, low in zip("abcde", (1000, 100, 100, 10, 10), strict=True)
    }
    results: list[str] = []
    plan = []
    for step in steps:
        expression = step.format(*results, **values)
        plan.append({"name": "calculator", "arguments": {"expression": expression}})
        results.append(calculator(expression))
    return {"prompt": text.format(**values), "kind": "arithmetic", "answer": results[-1], "plan": plan}


# --- lookup --------------------------------------------------------------------------------------------------------------


def _lookup(number: int, seed: int) -> Row:
    place = derive(seed, "tools", "corpus", number // SHARED)
    facts = _facts(place)
    random = generator(seed, "tools", "lookup", number)
    person = str(random.choice(list(facts)))
    chain, (asked, key) = facts[person], _ASKED[int(random.integers(len(_ASKED)))]
    plan = [{"name": "search", "arguments": {"query": hop.format(**chain)}} for hop in _HOPS[key]]
    return {"prompt": asked.format(person), "kind": "lookup", "answer": chain[key], "plan": plan, "corpus": place}


_ASKED = (
    ("On which river lies the town where {} was born?", "river of birth"),
    ("What does the company make that {} works for?", "goods"),
    ("On which river lies the town of the company that {} works for?", "river of work"),
)
_HOPS = {  # queries, each with a name that the one before has found
    "river of birth": ("{person} born", "{birth} river"),
    "goods": ("{person} works", "{company} makes"),
    "river of work": ("{person} works", "{company} seat", "{town} river"),
}


def _several(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


_SYLLABLES = _several("ba,cor,dan,el,fi,gor,hal,is,jun,kel,lo,mar,nor,os,pel,qui,ras,sil,tor,ul,ven,wil,yor,zan")
_GOODS = _several("clocks,ropes,lamps,kettles,violins,saddles,mirrors,ink,sails,bells,gloves,buttons,globes,kites")


@functools.lru_cache(maxsize=64)
def _facts(seed: int) -> Mapping[str, Mapping[str, str]]:
    """For each person of a corpus what hangs together with them."""
    random = generator(seed, "tools", "facts")
    names = _names(random, 4 * PEOPLE)
    people, towns, rivers, companies = (
        names[:PEOPLE],
        names[PEOPLE : 2 * PEOPLE],
        names[2 * PEOPLE : 3 * PEOPLE],
        names[3 * PEOPLE :],
    )

    def draw(items: Sequence[str]) -> str:
        return str(random.choice(items))

    river = dict(zip(towns, rivers, strict=True))
    seat = {company: draw(towns) for company in companies[: PEOPLE // 2]}
    goods = {company: draw(_GOODS) for company in seat}
    facts = {}
    for person in people:
        birth, company = draw(towns), draw(list(seat))
        town = seat[company]
        facts[person] = {
            "person": person,
            "birth": birth,
            "river of birth": river[birth],
            "company": company,
            "goods": goods[company],
            "town": town,
            "river of work": river[town],
        }
    return facts


@functools.lru_cache(maxsize=64)
def build_corpus(seed: int) -> tuple[list[str], Index]:
    """The documents of made-up facts about people, companies and towns of a seed, shuffled, and their index."""
    documents = set()
    for fact in _facts(seed).values():
        documents |= {
            f"{fact['person']} was born in {fact['birth']} and works for {fact['company']}.",
            f"{fact['company']} is a company that makes {fact['goods']}; it has its seat in {fact['town']}.",
            f"{fact['birth']} is a town on the river {fact['river of birth']}.",
            f"{fact['town']} is a town on the river {fact['river of work']}.",
        }
    texts = sorted(documents)
    return texts, Index(texts)


def _names(random: np.random.Generator, count: int) -> list[str]:
    """Names that differ."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(map(str, random.choice(_SYLLABLES, 3))).capitalize()] = None
    return list(names)


KINDS: Mapping[str, Callable[[int, int], Row]] = {"arithmetic": _arithmetic, "lookup": _lookup}
