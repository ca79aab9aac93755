"""The catalogues by name. Each is drawn from a seed, once in a process."""

import functools
from collections.abc import Callable, Mapping

from antiphon_envs.webshop.catalogue import Catalogue
from antiphon_envs.webshop.full_catalogue import full_catalogue
from antiphon_envs.webshop.tiny_catalogue import MOST_PRODUCTS, tiny_catalogue

CATALOGUES: Mapping[str, tuple[Callable[[int, int], Catalogue], int]] = {
    "full": (full_catalogue, 1000),
    "tiny": (tiny_catalogue, MOST_PRODUCTS),
}
"""By name: the function of a number of products and a seed, and the default number of products."""


@functools.lru_cache(maxsize=8)
def load_catalogue(name: str, products: int, seed: int) -> Catalogue:
    """Return the catalogue `name` with so many products; 0 stands for its default number."""
    make, default = CATALOGUES[name]
    return make(products or default, seed)
