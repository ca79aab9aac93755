"""The reward of WebShop for a purchase.

The formula is that of the WebShop paper (Yao et al., 2022, section 3.2 and appendix), with the constants of its code. Of the
two published versions of the option term it is the one that iterates over the goal's options. Titles are compared by their
nouns: the original finds them with spaCy, here the caller gives a function that does.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from antiphon.core.optional_packages import import_optional
from antiphon_envs.webshop.catalogue import Goal, Product

SAME_TEXT = 85  # similarity, of 100, above which texts count as the same
_LATIN_1 = dict.fromkeys(range(128, 256))  # letters that thefuzz drops

Nouns = Callable[[str], Collection[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PurchaseScore:
    """The reward and its parts."""

    value: float
    """From 0 to 1."""
    type: float
    """Factor for the kind of product: 0, 0.1, 0.5 or 1."""
    attributes: int
    """Attributes of the goal that the product has."""
    options: int
    """Options of the goal that were selected."""
    price: bool
    """True if the price is within the goal's bound."""


def score_purchase(
    goal: Goal, product: Product, selected: Mapping[str, str], nouns: Nouns, colors: Sequence[str] = ()
) -> PurchaseScore:
    """Score the purchase of `product` with the options `selected`."""
    kind = type_reward(goal.product, product, nouns)
    attributes = sum(_has_attribute(product, attribute) for attribute in goal.attributes)
    bought = [normalize_color(value, colors) for value in selected.values()]
    wanted = [normalize_color(value, colors) for value in goal.options.values()]
    options = sum(any(similarity(other, value) > SAME_TEXT for other in bought) for value in wanted)
    price = product.price_with(selected) <= goal.price_upper
    share = (attributes + options + price) / (len(goal.attributes) + len(wanted) + 1)
    return PurchaseScore(value=kind * share, type=kind, attributes=attributes, options=options, price=price)


def type_reward(wanted: Product, bought: Product, nouns: Nouns) -> float:
    """Return 1 for a product of the same kind by its query, two parts of its category or its title; less for others."""
    theirs, ours = set(nouns(wanted.title)), set(nouns(bought.title))
    title = len(theirs & ours) / len(theirs) if theirs else 0.2
    if title == 0.0:
        return 0.0  # even where query or category agree, as in the original
    if title < 0.1:
        return 0.1
    same = wanted.query == bought.query or len(set(wanted.category) & set(bought.category)) >= 2 or title > 0.2
    return 1.0 if same else 0.5


def similarity(first: str, second: str) -> int:
    """Return the similarity of two texts as sets of words, from 0 to 100, as `token_set_ratio` of thefuzz rounds it."""
    rapidfuzz = import_rapidfuzz()
    first, second = (rapidfuzz.utils.default_process(text.translate(_LATIN_1)) for text in (first, second))
    return round(rapidfuzz.fuzz.token_set_ratio(first, second))


@functools.cache
def import_rapidfuzz() -> Any:
    """Import the package `rapidfuzz`; `ConfigError` if it is not installed."""
    return import_optional("rapidfuzz", "WebShop's reward")


def normalize_color(value: str, colors: Sequence[str]) -> str:
    """Return the first of `colors` that occurs in the value; the value itself if none does.

    >>> normalize_color("dark green", ("blue", "green"))
    'green'
    """
    return next((color for color in colors if color in value), value)


def _has_attribute(product: Product, attribute: str) -> bool:
    if any(similarity(own, attribute) > SAME_TEXT for own in product.attributes):
        return True
    return any(attribute in text.lower() for text in (product.title, " ".join(product.bullets), product.description))
