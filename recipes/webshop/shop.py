"""Wishes of customers in tiny shops, and how a customer shops who has not learned to.

Goods, prices and options differ from shop to shop, and so do the ids of goods; no shop is in two splits. A prompt is the wish,
an observation the page, and what to do next follows from these two: no earlier page need be remembered.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from antiphon.core.rng import generator
from antiphon.core.types import Prompt
from antiphon.tasks.base import Reset
from antiphon.tasks.splits import split_of
from antiphon_envs.webshop.environment import WebShop

SHOPS, WISHES = 80, 40  # wishes of each shop
KIND_ALONE, FIRST_LISTED, ANYTHING = 0.67, 0.6, 0.35  # how often an unpractised customer does what is said below
BUY, AROUND = "click[buy now]", ("click[back to search]", "click[next >]", "click[< prev]")


class Visit(WebShop):
    """A visit to the shop of the prompt, for its wish; the wish itself is said once, by the prompt."""

    inline = True

    def __init__(self, prompt: Prompt, **options: Any) -> None:
        super().__init__(size="tiny", shop=prompt.payload["shop"], **options)
        self._wish = prompt.payload["wish"]

    def reset(self, seed: int) -> Reset:
        """Begin with the first page."""
        observation, info = super().reset(self._wish)
        return observation.partition("\n")[2], info


def wishes(split: str, unheard: bool = False) -> Iterator[dict[str, Any]]:
    """The prompts of one split; with `unheard` those whose words are no wish in a shop for training."""
    heard = {row["prompt"] for row in wishes("train")} if unheard else set()
    yield from (row for row in _wishes(split) if row["prompt"] not in heard)


def _wishes(split: str) -> Iterator[dict[str, Any]]:
    for shop in range(SHOPS):
        if split_of(f"shop {shop}") == split:
            for number in range(WISHES):
                wish = WebShop(size="tiny", shop=shop).reset(number)[0].partition("\n")[0]
                yield {"id": f"{shop}/{number}", "prompt": f"{wish}\n", "shop": shop, "wish": number}


def examples(split: str, turns: int = 12) -> Iterator[dict[str, str]]:
    """What an unpractised customer does on each page."""
    for row in wishes(split):
        visit, random, over = (
            WebShop(size="tiny", shop=row["shop"], turns=turns),
            generator(0, "customer", row["id"]),
            False,
        )
        page = visit.reset(row["wish"])[0].partition("\n")[2]
        while not over:
            action = _unpractised(visit, page, random)
            yield {"prompt": row["prompt"] + page, "response": action}
            page, _, terminated, truncated, _ = visit.step(action)
            over = terminated or truncated


def _unpractised(visit: WebShop, page: str, random: np.random.Generator) -> str:
    """Mostly searches for the kind of product alone, opens what is listed first, and on a product's page may do anything."""
    possible, luck = list(visit.actions()), random.random()
    listed = [action for action in possible if action not in AROUND]
    if page == "search":
        return possible[0] if luck < KIND_ALONE else visit.expert()
    if BUY not in possible:
        return listed[0] if luck < FIRST_LISTED else visit.expert()
    return str(random.choice(possible)) if luck < ANYTHING else visit.expert()
