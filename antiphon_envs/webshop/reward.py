"""What a purchase in WebShop is worth.

The formula is that of the WebShop paper (Yao et al., 2022, section 3.2 and appendix), with the constants of its code; of the
two versions of the option term in circulation, the one that goes through the goal's options. Titles are compared by their
nouns: the original finds those with spaCy, here whoever calls says what they are.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from antiphon.tasks.environments.extras import import_optional
from antiphon_envs.webshop.catalogue import Goal, Product

CLOSE = 85  # of 100: texts that are more alike than this are the same
_LATIN_1 = dict.fromkeys(range(128, 256))  # letters that thefuzz leaves out

Nouns = Callable[[str], Collection[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PurchaseScore:
    """The reward and its parts."""

    value: float
    """From 0 to 1."""
    type: float
    """Whether it is the right kind of product at all: 0, 0.1, 0.5 or 1; a factor of all else."""
    attributes: int
    """How many of the goal's the product has."""
    options: int
    """How many of the goal's were chosen."""
    price: bool
    """Whether it was low enough."""


def score_purchase(
    goal: Goal, product: Product, chosen: Mapping[str, str], nouns: Nouns, colours: Sequence[str] = ()
) -> PurchaseScore:
    """The verdict on buying `product` with the options `chosen`."""
    kind = type_reward(goal.product, product, nouns)
    attributes = sum(_has(product, attribute) for attribute in goal.attributes)
    bought = [normalize_color(value, colours) for value in chosen.values()]
    wanted = [normalize_color(value, colours) for value in goal.options.values()]
    options = sum(any(similarity(mine, value) > CLOSE for mine in bought) for value in wanted)
    price = product.price_with(chosen) <= goal.price_upper
    share = (attributes + options + price) / (len(goal.attributes) + len(wanted) + 1)
    return PurchaseScore(value=kind * share, type=kind, attributes=attributes, options=options, price=price)


def type_reward(wanted: Product, bought: Product, nouns: Nouns) -> float:
    """1 for a product of the same kind by its query, by two parts of its category or by its title; less for others."""
    theirs, ours = set(nouns(wanted.title)), set(nouns(bought.title))
    title = len(theirs & ours) / len(theirs) if theirs else 0.2
    if title == 0.0:
        return 0.0  # even where query or category agree: so it is in the original
    if title < 0.1:
        return 0.1
    same = wanted.query == bought.query or len(set(wanted.category) & set(bought.category)) >= 2 or title > 0.2
    return 1.0 if same else 0.5


def similarity(first: str, second: str) -> int:
    """How alike two texts are as sets of words, from 0 to 100: `token_set_ratio` of thefuzz, which rounds that of rapidfuzz."""
    rapidfuzz = import_rapidfuzz()
    first, second = (rapidfuzz.utils.default_process(text.translate(_LATIN_1)) for text in (first, second))
    return round(rapidfuzz.fuzz.token_set_ratio(first, second))


@functools.cache
def import_rapidfuzz() -> Any:
    """The package `rapidfuzz`; `ConfigError` if it is not installed."""
    return import_optional("rapidfuzz", "WebShop's reward")


def normalize_color(value: str, colours: Sequence[str]) -> str:
    """The first of `colours` that occurs in the value; the value itself if none does.

    >>> normal_colour("dark green", ("blue", "green"))
    'green'
    """
    return next((colour for colour in colours if colour in value), value)


def _has(product: Product, attribute: str) -> bool:
    if any(similarity(own, attribute) > CLOSE for own in product.attributes):
        return True
    return any(attribute in text.lower() for text in (product.title, " ".join(product.bullets), product.description))
