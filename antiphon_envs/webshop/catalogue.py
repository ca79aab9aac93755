"""Catalogues of products that do not exist, and what customers want of them; all drawn from a seed.

`full` has products of many kinds with long pages. `tiny` has short words, prices in whole dollars and no more than a title, a
colour and a size, so that a model of characters can learn to shop in it.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from antiphon.core.errors import ConfigError
from antiphon.core.rng import generator
from antiphon.tasks.environments.bm25 import Index, tokenize


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One page of the shop."""

    id: str
    title: str
    query: str
    """The kind of product that it is, as one would search for it."""
    category: tuple[str, ...]
    """From the department down."""
    price: float
    """In dollars, without what its options add."""
    attributes: tuple[str, ...]
    options: Mapping[str, Mapping[str, float]]
    """Name of the option -> value -> dollars that this value adds to the price."""
    bullets: tuple[str, ...] = ()
    description: str = ""
    reviews: tuple[str, ...] = ()

    def price_with(self, chosen: Mapping[str, str]) -> float:
        """In dollars, with these values of options."""
        return round(self.price + sum(self.options[name][value] for name, value in chosen.items()), 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a customer wants, and the product it was made from."""

    product: Product
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    price_upper: float
    """In dollars; a purchase may cost this, and no more."""


class Catalogue:
    """Products and what is known of them."""

    def __init__(self, products: list[Product], nouns: Collection[str], colours: Collection[str], attributes: int):
        """`nouns` are those of titles, `colours` those of options; a goal has at most so many `attributes`."""
        self.products = products
        self.colours = tuple(sorted(colours))
        self._nouns = frozenset(nouns)
        self._attributes = attributes
        self._index = Index([" ".join((p.title, p.query, *p.category, *p.bullets, p.description)) for p in products])

    def search(self, query: str, most: int) -> list[Product]:
        """At most so many products, best first."""
        return [self.products[number] for number in self._index.search(query, most)]

    def nouns(self, title: str) -> frozenset[str]:
        """The nouns of a title."""
        return self._nouns.intersection(tokenize(title))

    def goal(self, seed: int) -> Goal:
        """What the customer of this seed wants."""
        random = generator(seed, "webshop goal")
        product = self.products[int(random.integers(len(self.products)))]
        count = int(random.integers(1, min(self._attributes, len(product.attributes)), endpoint=True))
        options = {name: str(random.choice(list(values))) for name, values in product.options.items()}
        return Goal(
            product=product,
            attributes=tuple(map(str, random.choice(product.attributes, count, replace=False))),
            options=options,
            price_upper=_bound(product.price_with(options), random),
        )


def _bound(price: float, random: np.random.Generator) -> float:
    """The larger of two of the next four multiples of 10 dollars above the price, as WebShop draws it."""
    next_one = 10 * (int(price // 10) + 1)
    return float(next_one + 10 * max(random.choice(4, 2, replace=False)))


# --- the full one --------------------------------------------------------------------------------------------------------


def _several(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


@dataclass(frozen=True, slots=True)
class _Family:
    """What the kinds of products of one department have in common; lists are separated by commas."""

    category: tuple[str, str]
    kinds: str
    attributes: str
    materials: str
    sizes: str
    prices: tuple[int, int]


_FAMILIES = (
    _Family(
        ("Clothing, Shoes & Jewelry", "Shoes"),
        "running shoes,hiking boots,leather loafers,ballet flats,house slippers,rain boots",
        "slip resistant,arch support,memory foam,water resistant,rubber sole,steel toe,wide fit,quick drying,shock absorbing",
        "leather,suede,canvas,mesh",
        "6,7,8,9,10,11",
        (19, 140),
    ),
    _Family(
        ("Clothing, Shoes & Jewelry", "Clothing"),
        "rain jacket,wool sweater,cotton shirt,denim jeans,winter coat,yoga pants,linen dress",
        "machine washable,slim fit,long sleeve,moisture wicking,hand wash,relaxed fit,drawstring,elastic waist,wrinkle free",
        "cotton,wool,linen,polyester,fleece",
        "small,medium,large,x-large,xx-large",
        (12, 160),
    ),
    _Family(
        ("Home & Kitchen", "Furniture"),
        "coffee table,bar stool,desk lamp,book shelf,night stand,office chair,shoe rack",
        "easy assembly,space saving,height adjustable,scratch resistant,heavy duty,fully assembled,storage space,eco friendly",
        "oak,walnut,bamboo,steel,glass",
        "narrow,regular,wide",
        (25, 420),
    ),
    _Family(
        ("Home & Kitchen", "Bedding & Decor"),
        "throw pillow,window curtains,floor rug,fleece blanket,duvet cover,wall clock",
        "machine washable,fade resistant,double sided,super soft,easy clean,stain resistant,noise reducing,light blocking",
        "cotton,velvet,jute,silk,linen",
        "18 inch,24 inch,36 inch,48 inch",
        (9, 130),
    ),
    _Family(
        ("Electronics", "Accessories"),
        "bluetooth speaker,phone case,laptop sleeve,power bank,charging cable,camera bag,game headset",
        "fast charging,high definition,hands free,dust proof,easy install,noise cancelling,ultra thin,long lasting,water proof",
        "aluminum,silicone,nylon,carbon",
        "compact,standard,plus",
        (8, 190),
    ),
    _Family(
        ("Beauty & Personal Care", "Skin & Hair"),
        "face cream,shampoo bar,lip balm,hair brush,body lotion,bath towel",
        "cruelty free,fragrance free,paraben free,sensitive skin,long lasting,dry skin,travel size,sulfate free",
        "coconut,jojoba,almond,charcoal",
        "2 ounce,4 ounce,8 ounce,16 ounce",
        (5, 60),
    ),
    _Family(
        ("Grocery & Gourmet Food", "Pantry"),
        "green tea,trail mix,dark chocolate,coffee beans,granola bars,olive oil",
        "gluten free,sugar free,non gmo,low sodium,dairy free,high protein,individually wrapped,artificial flavors free",
        "ginger,vanilla,lemon,honey",
        "pack of 1,pack of 3,pack of 6,pack of 12",
        (4, 70),
    ),
)
_BRANDS = _several(
    "Alderway,Brightholm,Corvane,Dunmere,Estrell,Fernhill,Galdor,Hartwick,Ivendale,Jorvik,Kestane,Lumara"
)
_AUDIENCES = _several("women,men,kids,travel,gifts,home,students,beginners")
_COLOURS = _several("beige,black,blue,brown,gold,gray,green,ivory,navy,orange,pink,purple,red,silver,teal,white,yellow")
_SHADES = ("", "", "", "", "dark ", "light ")
_NOT_NOUNS = {"running", "charging", "green", "dark", "fleece"}
_OPINIONS = (
    "Does what it should.",
    "Arrived a day late, but it is lovely.",
    "I bought a second one for my sister.",
    "Smaller than I thought from the pictures.",
    "Good value at this price.",
    "After three months it looks like new.",
)
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def _full(size: int, seed: int) -> Catalogue:
    random = generator(seed, "webshop", "full")
    ids: set[str] = set()
    while len(ids) < size:
        ids.add("B0" + "".join(_LETTERS[int(index)] for index in random.integers(len(_LETTERS), size=8)))
    nouns = {word for family in _FAMILIES for kind in family.kinds.split(",") for word in kind.split()} - _NOT_NOUNS
    nouns |= {word for family in _FAMILIES for word in family.materials.split(",")} | set(_AUDIENCES)
    products = [_full_product(id, random) for id in sorted(ids)]
    return Catalogue(products, nouns | {brand.lower() for brand in _BRANDS}, _COLOURS, attributes=3)


def _full_product(id: str, random: np.random.Generator) -> Product:
    def draw(items: Sequence[str], count: int) -> list[str]:
        return [str(each) for each in random.choice(items, count, replace=False)]

    family = _FAMILIES[int(random.integers(len(_FAMILIES)))]
    (kind,), (brand,), (material,) = (draw(x, 1) for x in (_several(family.kinds), _BRANDS, _several(family.materials)))
    attributes = draw(_several(family.attributes), int(random.integers(3, 6)))
    audience = draw(_AUDIENCES, 2)
    low, high = family.prices
    count = int(random.integers(2, 7))
    colours = [shade + colour for shade, colour in zip(draw(_SHADES, count), draw(_COLOURS, count), strict=True)]
    sizes = _several(family.sizes)
    first = int(random.integers(len(sizes) - 1))
    step = float(random.integers(0, 4))
    return Product(
        id=id,
        title=f"{brand} {attributes[0]} {material} {kind} for {audience[0]}, {attributes[1]}".title(),
        query=kind,
        category=(*family.category, kind.title()),
        price=round(float(random.uniform(low, high)), 2),
        attributes=tuple(attributes),
        options={
            "color": dict.fromkeys(colours, 0.0),
            "size": {size: step * number for number, size in enumerate(sizes[first:])},
        },
        bullets=(
            *(f"{attribute.capitalize()}: made with {material} for everyday use." for attribute in attributes),
            f"A {kind} that {audience[1]} like, by {brand}.",
        ),
        description=f"The {brand} {kind} comes in {len(colours)} colors. It is {attributes[-1]} and made with {material}.",
        reviews=tuple(f"{int(random.integers(2, 6))} of 5 stars: {opinion}" for opinion in draw(list(_OPINIONS), 2)),
    )


# --- the tiny one --------------------------------------------------------------------------------------------------------

_TINY_KINDS = _several("hat,mug,bag,sock,vest,lamp")
_TINY_ATTRIBUTES = _several("soft,warm,thin,neat")
_TINY_OPTIONS = _TINY_COLOURS, _TINY_SIZES = _several("red,blue,tan,pink"), _several("s,m,l")


def _tiny(size: int, seed: int) -> Catalogue:
    random = generator(seed, "webshop", "tiny")
    pairs = [(attribute, kind) for kind in _TINY_KINDS for attribute in _TINY_ATTRIBUTES]
    if size > len(pairs):
        raise ConfigError(f"products={size}: a tiny shop has 1 to {len(pairs)}")
    products = []
    for number, index in enumerate(random.permutation(len(pairs))[:size]):
        attribute, kind = pairs[index]
        colours, sizes = (
            [values[i] for i in sorted(random.choice(len(values), 2, replace=False))] for values in _TINY_OPTIONS
        )
        products.append(
            Product(
                id=f"{'abcdefgh'[number // 9]}{number % 9 + 1}",
                title=f"{attribute} {kind}",
                query=kind,
                category=(kind,),
                price=float(random.integers(5, 40)),
                attributes=(attribute,),
                options={"color": dict.fromkeys(colours, 0.0), "size": dict.fromkeys(sizes, 0.0)},
            )
        )
    return Catalogue(products, _TINY_KINDS, _TINY_COLOURS, attributes=1)


CATALOGUES: Mapping[str, tuple[Callable[[int, int], Catalogue], int]] = {"full": (_full, 1000), "tiny": (_tiny, 24)}
"""By name: what makes it of a number of products and a seed, and how many it has by default."""


@functools.lru_cache(maxsize=8)
def load_catalogue(name: str, products: int, seed: int) -> Catalogue:
    """The catalogue called `name`, with so many products (0: as many as it has by default). Made once in a process."""
    if name not in CATALOGUES:
        raise ConfigError(f"size={name!r}: valid are {', '.join(CATALOGUES)}")
    if products < 0:
        raise ConfigError(f"products={products}: a shop has at least 1, or 0 for its default")
    make, size = CATALOGUES[name]
    return make(products or size, seed)
