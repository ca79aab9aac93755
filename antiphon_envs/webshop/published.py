"""WebShop's own products and goals, from the files that its authors publish.

    items_shuffle.json, items_shuffle_1000.json     products, as a list
    items_ins_v2.json, items_ins_v2_1000.json       attributes of products, and instructions that were made from them
    items_human_ins.json                            instructions that people wrote

What is read of them, and the order of goals, are those of the original (github.com/princeton-nlp/WebShop). Prices between two
bounds and bounds of goals are random there; here they follow from the seed of the shop.
"""

import functools
import itertools
import math
import random
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from antiphon.core.errors import DataError
from antiphon.core.rng import generator
from antiphon.tasks.environments.tools.bm25 import tokenize
from antiphon_envs.webshop.catalogue import Catalogue, Goal, Product

T = TypeVar("T")

ORDER_SEED = (
    233  # with which the original puts goals in order: its test split is the first 500, then 1,000 to validate on
)
NO_PRICE = 100.0  # of a product without one
HIGHEST_BOUND = 990.0  # on the price of a goal; above it none is set
NO_BOUND = 1_000_000.0
UNKNOWN_ATTRIBUTE = "DUMMY_ATTR"  # of a product without attributes
COLORS = tuple(
    re.findall(
        r"\w+",
        """beige black blue bronze brown burgundy camel champagne charcoal coffee copper coral cream cyan fuchsia gold gray
        green grey indigo ivory khaki lavender magenta maroon mint mustard navy olive orange peach pink plum purple red rose
        rust salmon silver tan taupe teal turquoise violet walnut white wine yellow""",
    )
)
"""Shades of one color count as the same option. The original has more of them, in an order of its own."""


class _Value(msgspec.Struct):
    value: str


class _Item(msgspec.Struct):
    asin: str
    name: str
    query: str
    product_category: str
    full_description: str | None = ""
    small_description: list[str] | str | None = ""
    pricing: str | None = ""
    customization_options: dict[str, list[_Value] | None] | str | None = None


class _Attributes(msgspec.Struct):
    attributes: tuple[str, ...] = (UNKNOWN_ATTRIBUTE,)
    instruction: str | None = None
    instruction_attributes: tuple[str, ...] = ()


class _Instruction(msgspec.Struct):
    instruction: str
    instruction_attributes: tuple[str, ...]
    instruction_options: tuple[str, ...] | dict[str, str] = ()


class PublishedCatalogue(Catalogue):
    """Products as published, and the goals that are published for them."""

    def __init__(
        self,
        products: list[Product],
        goals: Mapping[str, Sequence[_Instruction]],
        made: Mapping[str, _Attributes],
        seed: int,
    ) -> None:
        """Index products.

        Args:
            products: All products.
            goals: By product, instructions that people wrote; empty to use those of `made`.
            made: By product, instructions that were made: one goal for each choice of options.
            seed: Of what is drawn: the bounds of prices.
        """
        nouns = {word for product in products for text in (product.query, *product.category) for word in tokenize(text)}
        super().__init__(products, nouns, COLORS, attributes=1)
        self._written, self._made, self._seed = goals, made, seed
        self._ends = list(itertools.accumulate(map(self._count, products)))
        self._order = list(range(self._ends[-1] if self._ends else 0))
        random.Random(ORDER_SEED).shuffle(self._order)

    @property
    def goals(self) -> int:
        """Number of goals."""
        return len(self._order)

    def goal(self, seed: int) -> Goal:
        """Return goal number `seed` in the order of the original, from the first again after the last."""
        number = self._order[seed % len(self._order)]
        place = bisect_right(self._ends, number)
        product = self.products[place]
        bound, text = self._price_bound(product, number)
        index = number - (self._ends[place - 1] if place else 0)
        if self._written:
            written = self._usable(product)[index]
            options = _name_options(written.instruction_options, product)
            attributes, instruction = written.instruction_attributes, written.instruction.strip(".")
        else:
            made, options = self._made[product.id], dict[str, str]()
            for name, values in sorted(product.options.items(), reverse=True):
                index, chosen = divmod(index, len(values))
                options = {name: list(values)[chosen], **options}
            chosen_text = ", and ".join(f"{name}: {value}" for name, value in options.items())
            attributes = made.instruction_attributes
            instruction = f"{made.instruction}{' with ' if chosen_text else ''}{chosen_text}"
        return Goal(
            product=product,
            attributes=attributes,
            options=options,
            price_upper=bound,
            instruction=f"{instruction}{text}",
        )

    def _usable(self, product: Product) -> list[_Instruction]:
        return [each for each in self._written.get(product.id, ()) if each.instruction_attributes]

    def _count(self, product: Product) -> int:
        """Return the number of goals that a product has."""
        if self._written:
            return len(self._usable(product))
        made = self._made.get(product.id)
        return math.prod(map(len, product.options.values())) if made and made.instruction else 0

    def _price_bound(self, product: Product, number: int) -> tuple[float, str]:
        """Return the bound of a goal on the price, the larger of two of the next four tens, and how its instruction says it."""
        first = 10.0 * (product.price // 10 + 1)
        bounds = [bound for bound in (first + 10.0 * step for step in range(4)) if bound <= HIGHEST_BOUND]
        if len(bounds) < 2:
            return NO_BOUND, ""
        chosen = generator(self._seed, "webshop bound", number).choice(bounds, 2, replace=False)
        return float(max(chosen)), f", and price lower than {max(chosen):.2f} dollars"


@functools.lru_cache(maxsize=2)
def load_published(items: str, attributes: str, goals: str, products: int, seed: int) -> PublishedCatalogue:
    """Return the catalogue of published files.

    Args:
        items: File of products.
        attributes: File of their attributes, with instructions that were made from them.
        goals: File of instructions that people wrote; empty to use the others.
        products: Number of products to use, the first of the file; 0 is all.
        seed: Of what the original draws at random.

    Raises:
        DataError: A file is missing or malformed, or there is no goal for any product.
    """
    made = _read(attributes, dict[str, _Attributes])
    written = _read(goals, dict[str, list[_Instruction]]) if goals else {}
    found = list(_products(_read(items, list[_Item])[: products or None], made, seed))
    catalogue = PublishedCatalogue(found, written, made, seed)
    if not catalogue.goals:
        raise DataError(
            f"{goals or attributes} has no goal for any of the {len(found)} products in {items}",
            path=goals or attributes,
        )
    return catalogue


def _read(path: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=kind)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", path=path) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not as WebShop publishes it: {error}", path=path) from error


def _products(items: Sequence[_Item], made: Mapping[str, _Attributes], seed: int) -> Iterator[Product]:
    """Yield the products of items, each id once."""
    seen = set()
    for item in items:
        if item.asin in seen or item.asin == "nan" or len(item.asin) > 10:
            continue
        seen.add(item.asin)
        bullets = item.small_description or []
        yield Product(
            id=item.asin,
            title=item.name,
            query=item.query.lower().strip(),
            category=tuple(part.strip() for part in item.product_category.split("›")),
            price=_price(item, seed),
            attributes=made[item.asin].attributes if item.asin in made else (UNKNOWN_ATTRIBUTE,),
            options=_options(item),
            bullets=(bullets,) if isinstance(bullets, str) else tuple(bullets),
            description=item.full_description or "",
        )


def _price(item: _Item, seed: int) -> float:
    """Return the price of an item, or one between its two bounds."""
    prices = [float(number) for part in (item.pricing or "").split("$")[1:] if (number := re.sub(r"[^\d.]", "", part))]
    if len(prices) < 2:
        return prices[0] if prices else NO_PRICE
    low, high = sorted(prices[:2])
    return round(float(generator(seed, "webshop price", item.asin).uniform(low, high)), 2)


def _options(item: _Item) -> dict[str, dict[str, float]]:
    """Return the values of each option of an item, which add nothing to its price."""
    given = item.customization_options
    return {
        name.lower(): {each.value.strip().replace("/", " | ").lower(): 0.0 for each in values}
        for name, values in (given.items() if isinstance(given, dict) else ())
        if values
    }


def _name_options(wanted: Sequence[str] | Mapping[str, str], product: Product) -> dict[str, str]:
    """Return the wanted values by the names of the product's options; by a number where no option has such a value."""
    if isinstance(wanted, Mapping):
        return dict(wanted)
    names = {value: name for name, values in product.options.items() for value in values}
    return {names.get(value.lower(), f"option {number}"): value for number, value in enumerate(wanted, 1)}
