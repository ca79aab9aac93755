"""Problems that need tools: arithmetic with large numbers, and questions whose answer takes several searches."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from antiphon.core.errors import ConfigError, DataError
from antiphon.core.rng import derive, generator
from antiphon.tasks.environments.tools.bm25 import Index
from antiphon.tasks.environments.tools.calculator import calculator
from antiphon.tasks.splits import check_split, split_of

Row = dict[str, Any]

PEOPLE = 40  # people of a corpus, which has as many towns and half as many companies
PROBLEMS_PER_CORPUS = 50


def tool_problems(
    split: str, size: int = 1000, seed: int = 0, kinds: Sequence[str] = ("arithmetic", "lookup")
) -> Iterator[Row]:
    """Yield `size` different problems of one split, cycling through `kinds`.

    A row has the `answer` and a `plan` of calls that find it. A hash of the question decides its split.
    """
    check_split(split)
    if not kinds or not set(kinds) <= set(KINDS):
        message = f"{list(kinds)} must be one or more of {', '.join(KINDS)}"
        raise ConfigError(message, key="options.kinds", value=kinds, valid=KINDS)
    seen: set[str] = set()
    for number in range(100 * (size + 10)):
        if len(seen) == size:
            return
        row = KINDS[kinds[number % len(kinds)]](number, seed)
        if row["prompt"] not in seen and split_of(row["prompt"]) == split:
            seen.add(row["prompt"])
            yield row
    raise DataError(f"tools: {size} different {split} problems were asked for, only {len(seen)} exist")


# --- arithmetic ----------------------------------------------------------------------------------------------------------

_STORIES = (  # text, and the expressions of its steps
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


def _draw_arithmetic(number: int, seed: int) -> Row:
    random = generator(seed, "tools", "arithmetic", number)
    text, steps = _STORIES[int(random.integers(len(_STORIES)))]
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


def _draw_lookup(number: int, seed: int) -> Row:
    corpus = derive(seed, "tools", "corpus", number // PROBLEMS_PER_CORPUS)
    facts = _draw_facts(corpus)
    random = generator(seed, "tools", "lookup", number)
    person = str(random.choice(list(facts)))
    chain, (question, key) = facts[person], _QUESTIONS[int(random.integers(len(_QUESTIONS)))]
    plan = [{"name": "search", "arguments": {"query": hop.format(**chain)}} for hop in _HOPS[key]]
    return {"prompt": question.format(person), "kind": "lookup", "answer": chain[key], "plan": plan, "corpus": corpus}


_QUESTIONS = (
    ("On which river lies the town where {} was born?", "river of birth"),
    ("What does the company make that {} works for?", "goods"),
    ("On which river lies the town of the company that {} works for?", "river of work"),
)
_HOPS = {  # queries, each with a name that the previous one found
    "river of birth": ("{person} born", "{birth} river"),
    "goods": ("{person} works", "{company} makes"),
    "river of work": ("{person} works", "{company} seat", "{town} river"),
}


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


_SYLLABLES = _split("ba,cor,dan,el,fi,gor,hal,is,jun,kel,lo,mar,nor,os,pel,qui,ras,sil,tor,ul,ven,wil,yor,zan")
_GOODS = _split("clocks,ropes,lamps,kettles,violins,saddles,mirrors,ink,sails,bells,gloves,buttons,globes,kites")


@functools.lru_cache(maxsize=64)
def _draw_facts(seed: int) -> Mapping[str, Mapping[str, str]]:
    """Draw the facts about each person of a corpus."""
    random = generator(seed, "tools", "facts")
    names = _draw_names(random, 4 * PEOPLE)
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
    """Return documents of made-up facts about people, companies and towns, sorted, and their index."""
    documents = set()
    for fact in _draw_facts(seed).values():
        documents |= {
            f"{fact['person']} was born in {fact['birth']} and works for {fact['company']}.",
            f"{fact['company']} is a company that makes {fact['goods']}; it has its seat in {fact['town']}.",
            f"{fact['birth']} is a town on the river {fact['river of birth']}.",
            f"{fact['town']} is a town on the river {fact['river of work']}.",
        }
    texts = sorted(documents)
    return texts, Index(texts)


def _draw_names(random: np.random.Generator, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(map(str, random.choice(_SYLLABLES, 3))).capitalize()] = None
    return list(names)


KINDS: Mapping[str, Callable[[int, int], Row]] = {"arithmetic": _draw_arithmetic, "lookup": _draw_lookup}
