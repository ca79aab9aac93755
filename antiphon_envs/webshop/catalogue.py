"""Products, catalogues of them, and the goals of customers."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from antiphon.core.rng import generator
from antiphon.tasks.environments.tools.bm25 import Index, tokenize


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product and the texts of its page."""

    id: str
    title: str
    query: str
    """The kind of product, as a customer would search for it."""
    category: tuple[str, ...]
    """Path of categories, from the department down."""
    price: float
    """In dollars, without options."""
    attributes: tuple[str, ...]
    options: Mapping[str, Mapping[str, float]]
    """Name of an option -> value -> dollars that the value adds to the price."""
    bullets: tuple[str, ...] = ()
    description: str = ""
    reviews: tuple[str, ...] = ()

    def price_with(self, selected: Mapping[str, str]) -> float:
        """Return the price in dollars with these values of options."""
        return round(self.price + sum(self.options[name][value] for name, value in selected.items()), 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The request of a customer, and the product that it was made from."""

    product: Product
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    price_upper: float
    """Most dollars that a purchase may cost."""
    instruction: str = ""
    """The request in words, if it is published; empty: it is written from the fields above."""


class Catalogue:
    """Products with an index, and the words that the reward needs."""

    def __init__(self, products: list[Product], nouns: Collection[str], colors: Collection[str], attributes: int):
        """Index products.

        Args:
            products: All products.
            nouns: The nouns that occur in titles.
            colors: The colors that occur in options.
            attributes: Most attributes of a goal.
        """
        self.products = products
        self.colors = tuple(sorted(colors))
        self._nouns = frozenset(nouns)
        self._attributes = attributes
        self._index = Index([" ".join((p.title, p.query, *p.category, *p.bullets, p.description)) for p in products])

    def search(self, query: str, most: int) -> list[Product]:
        """Return at most `most` products, best first."""
        return [self.products[number] for number in self._index.search(query, most)]

    def nouns(self, title: str) -> frozenset[str]:
        """Return the nouns of a title."""
        return self._nouns.intersection(tokenize(title))

    def goal(self, seed: int) -> Goal:
        """Draw the goal of a customer."""
        random = generator(seed, "webshop goal")
        product = self.products[int(random.integers(len(self.products)))]
        count = int(random.integers(1, min(self._attributes, len(product.attributes)), endpoint=True))
        options = {name: str(random.choice(list(values))) for name, values in product.options.items()}
        return Goal(
            product=product,
            attributes=tuple(map(str, random.choice(product.attributes, count, replace=False))),
            options=options,
            price_upper=_draw_price_bound(product.price_with(options), random),
        )


def _draw_price_bound(price: float, random: np.random.Generator) -> float:
    """Return the larger of two of the next four multiples of 10 dollars above the price, as WebShop draws it."""
    next_one = 10 * (int(price // 10) + 1)
    return float(next_one + 10 * max(random.choice(4, 2, replace=False)))
