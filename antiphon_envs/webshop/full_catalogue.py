"""The catalogue `full`: products of many kinds with long pages, drawn from a seed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from antiphon.core.rng import generator
from antiphon_envs.webshop.catalogue import Catalogue, Product


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


@dataclass(frozen=True, slots=True)
class _Family:
    """The products of one department; lists are separated by commas."""

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
_BRANDS = _split("Alderway,Brightholm,Corvane,Dunmere,Estrell,Fernhill,Galdor,Hartwick,Ivendale,Jorvik,Kestane,Lumara")
_AUDIENCES = _split("women,men,kids,travel,gifts,home,students,beginners")
_COLORS = _split("beige,black,blue,brown,gold,gray,green,ivory,navy,orange,pink,purple,red,silver,teal,white,yellow")
_SHADES = ("", "", "", "", "dark ", "light ")
_NOT_NOUNS = {"running", "charging", "green", "dark", "fleece"}
_REVIEWS = (
    "Does what it should.",
    "Arrived a day late, but it is lovely.",
    "I bought a second one for my sister.",
    "Smaller than I thought from the pictures.",
    "Good value at this price.",
    "After three months it looks like new.",
)
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def full_catalogue(size: int, seed: int) -> Catalogue:
    """Draw a catalogue of `size` products."""
    random = generator(seed, "webshop", "full")
    ids: set[str] = set()
    while len(ids) < size:
        ids.add("B0" + "".join(_LETTERS[int(index)] for index in random.integers(len(_LETTERS), size=8)))
    nouns = {word for family in _FAMILIES for kind in family.kinds.split(",") for word in kind.split()} - _NOT_NOUNS
    nouns |= {word for family in _FAMILIES for word in family.materials.split(",")} | set(_AUDIENCES)
    products = [_draw_product(id, random) for id in sorted(ids)]
    return Catalogue(products, nouns | {brand.lower() for brand in _BRANDS}, _COLORS, attributes=3)


def _draw_product(id: str, random: np.random.Generator) -> Product:
    def draw(items: Sequence[str], count: int) -> list[str]:
        return [str(each) for each in random.choice(items, count, replace=False)]

    family = _FAMILIES[int(random.integers(len(_FAMILIES)))]
    (kind,), (brand,), (material,) = (draw(x, 1) for x in (_split(family.kinds), _BRANDS, _split(family.materials)))
    attributes = draw(_split(family.attributes), int(random.integers(3, 6)))
    audience = draw(_AUDIENCES, 2)
    low, high = family.prices
    count = int(random.integers(2, 7))
    colors = [shade + color for shade, color in zip(draw(_SHADES, count), draw(_COLORS, count), strict=True)]
    sizes = _split(family.sizes)
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
            "color": dict.fromkeys(colors, 0.0),
            "size": {size: step * number for number, size in enumerate(sizes[first:])},
        },
        bullets=(
            *(f"{attribute.capitalize()}: made with {material} for everyday use." for attribute in attributes),
            f"A {kind} that {audience[1]} like, by {brand}.",
        ),
        description=f"The {brand} {kind} comes in {len(colors)} colors. It is {attributes[-1]} and made with {material}.",
        reviews=tuple(f"{int(random.integers(2, 6))} of 5 stars: {opinion}" for opinion in draw(list(_REVIEWS), 2)),
    )
