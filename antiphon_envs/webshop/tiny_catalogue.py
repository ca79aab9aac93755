"""The catalogue `tiny`: products with a title of two words, a color and a size, for models of characters."""

from antiphon.core.rng import generator
from antiphon_envs.webshop.catalogue import Catalogue, Product

_KINDS = ("hat", "mug", "bag", "sock", "vest", "lamp")
_ATTRIBUTES = ("soft", "warm", "thin", "neat")
_COLORS, _SIZES = ("red", "blue", "tan", "pink"), ("s", "m", "l")

MOST_PRODUCTS = len(_KINDS) * len(_ATTRIBUTES)


def tiny_catalogue(size: int, seed: int) -> Catalogue:
    """Draw a catalogue of `size` products, at most 24."""
    random = generator(seed, "webshop", "tiny")
    pairs = [(attribute, kind) for kind in _KINDS for attribute in _ATTRIBUTES]
    products = []
    for number, index in enumerate(random.permutation(len(pairs))[:size]):
        attribute, kind = pairs[index]
        colors, sizes = (
            [values[i] for i in sorted(random.choice(len(values), 2, replace=False))] for values in (_COLORS, _SIZES)
        )
        products.append(
            Product(
                id=f"{'abcdefgh'[number // 9]}{number % 9 + 1}",
                title=f"{attribute} {kind}",
                query=kind,
                category=(kind,),
                price=float(random.integers(5, 40)),
                attributes=(attribute,),
                options={"color": dict.fromkeys(colors, 0.0), "size": dict.fromkeys(sizes, 0.0)},
            )
        )
    return Catalogue(products, _KINDS, _COLORS, attributes=1)
