"""A shop to buy from: search, look at pages, choose options, buy. After WebShop (Yao et al., 2022), with products of our own.

Actions are `search[words]` on the first page, and `click[...]` of what a page shows.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from antiphon.core.errors import ConfigError
from antiphon.core.registry import import_path
from antiphon.tasks.environments.actions import extract_answer, match_action
from antiphon_envs.webshop.catalogue import Goal, Product, load_catalogue
from antiphon_envs.webshop.reward import Nouns, import_rapidfuzz, score_purchase

Step = tuple[str, float, bool, bool, dict[str, Any]]

BACK, NEXT, PREVIOUS, BUY = "back to search", "next >", "< prev", "buy now"
MOST = 50  # results of a search

_ACTION = re.compile(r"(search|click)\[(.*)\]", re.DOTALL | re.IGNORECASE)


class WebShop:
    """One visit to the shop, for a customer who wants a kind of product with attributes, options and a bound on its price.

    Buying ends it, with the reward of the paper (`webshop_reward.judge`); all else is worth 0, as is running out of turns.
    `info["success"]` is true for a reward of 1. `size` is `full` or `tiny`: the latter has two dozen products, pages and
    actions of a few short words, and is meant for models of characters.
    """

    def __init__(
        self,
        size: str = "full",
        products: int = 0,
        shop: int = 0,
        turns: int = 15,
        format_penalty: float = 0.0,
        nouns: str = "",
    ) -> None:
        """A catalogue of so many `products` (0: its default) drawn from the seed `shop`. An action that cannot be read
        costs `format_penalty`. `nouns`, `package.module:function`, finds the nouns of a title."""
        if turns < 1:
            raise ConfigError(f"turns={turns}: a visit has at least 1")
        import_rapidfuzz()  # or an error now, not at the end
        self._shop = load_catalogue(size, products, shop)
        self._brief = size == "tiny"
        self._per_page = 3 if self._brief else 10
        self._nouns: Nouns = import_path(nouns, "nouns") if nouns else self._shop.nouns
        self._left, self._penalty = turns, format_penalty
        self._goal: Goal | None = None
        self._go_to_search()

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Begin; the customer's wish depends on `seed` only."""
        self._goal = self._shop.goal(seed)
        return f"{self._instruction()}\n{self._page()}", self._info(valid=True, effective=True)

    def step(self, action: str) -> Step:
        """Search or click."""
        if self._goal is None or not self._left:
            raise RuntimeError("the visit is over, or was never begun: call reset first")
        self._left -= 1
        read = _ACTION.fullmatch(extract_answer(action))
        if read is None:
            return self._end_turn("This is no action.", -self._penalty, valid=False, effective=False)
        before = self._state_key()
        if read[1].lower() == "search":
            valid = self._search(read[2])
        else:
            button = match_action(read[2], self._buttons())
            if button == BUY:
                return self._buy(self._goal)
            valid = button is not None
            if button is not None:
                self._click(button)
        return self._end_turn("" if valid else "Not here.", 0.0, valid=valid, effective=self._state_key() != before)

    def close(self) -> None:
        """Nothing is held."""

    def actions(self) -> Sequence[str]:
        """All clicks of the page; on the first page, searches for what is wanted, by more or fewer words."""
        goal = self._begun()
        if self._results is None:
            kind = goal.product.query
            return [f"search[{kind}]", *(f"search[{attribute} {kind}]" for attribute in goal.attributes)]
        return [f"click[{button}]" for button in self._buttons()]

    def expert(self) -> str:
        """Find the product that the wish was made from, choose its options, buy."""
        goal = self._begun()
        if self._results is None:
            return f"search[{goal.product.title}]"
        return f"click[{self._expert_click(goal)}]"

    def _expert_click(self, goal: Goal) -> str:
        buttons = self._buttons()
        if self._product is None:
            return next(each for each in (goal.product.id, NEXT, BACK) if each in buttons)
        if self._product != goal.product:
            return BACK
        if self._section:
            return PREVIOUS
        return next((v for name, v in goal.options.items() if self._chosen.get(name) != v), BUY)

    # --- where one is ----------------------------------------------------------------------------------------------------

    def _go_to_search(self) -> None:
        self._query = ""
        self._results: list[Product] | None = None  # None: on the first page
        self._number = 0  # of the page of results
        self._leave_product()

    def _leave_product(self) -> None:
        self._product: Product | None = None
        self._section = ""  # of the product's page
        self._chosen: dict[str, str] = {}

    def _search(self, query: str) -> bool:
        if self._results is not None:
            return False
        self._query = " ".join(query.lower().split())
        self._results = self._shop.search(query, MOST)
        return True

    def _click(self, button: str) -> None:
        if button == BACK:
            self._go_to_search()
        elif self._product is None:
            self._click_result(button)
        elif button == PREVIOUS:
            if self._section:
                self._section = ""
            else:
                self._leave_product()
        elif button in self._sections(self._product):
            self._section = button
        else:
            name = next(name for name, values in self._product.options.items() if button in values)
            self._chosen[name] = button

    def _click_result(self, button: str) -> None:
        if button in (NEXT, PREVIOUS):
            self._number += 1 if button == NEXT else -1
        else:
            self._product = next(product for product in self._shown() if product.id == button)

    def _buy(self, goal: Goal) -> Step:
        assert self._product is not None
        verdict = score_purchase(goal, self._product, self._chosen, self._nouns, self._shop.colours)
        self._left = 0
        info = self._info(valid=True, effective=True) | {"success": verdict.value == 1.0, "parts": asdict(verdict)}
        return f"Bought. Reward: {verdict.value:.2f}", verdict.value, True, False, info

    def _end_turn(self, remark: str, reward: float, *, valid: bool, effective: bool) -> Step:
        over = not self._left
        info = self._info(valid=valid, effective=effective) | ({"success": False} if over else {})
        return f"{remark}\n{self._page()}" if remark else self._page(), reward, False, over, info

    def _begun(self) -> Goal:
        if self._goal is None:
            raise RuntimeError("the visit was never begun: call reset first")
        return self._goal

    # --- what one sees ---------------------------------------------------------------------------------------------------

    def _shown(self) -> list[Product]:
        first = self._number * self._per_page
        return (self._results or [])[first : first + self._per_page]

    def _sections(self, product: Product) -> dict[str, Sequence[str]]:
        """What else there is to read of a product."""
        texts: dict[str, Sequence[str]] = {
            "description": [product.description] if product.description else [],
            "features": product.bullets,
            "reviews": product.reviews,
            "attributes": product.attributes,
        }
        return {} if self._brief else {name: lines for name, lines in texts.items() if lines}

    def _buttons(self) -> list[str]:
        """All that can be clicked."""
        if self._results is None:
            return []
        if self._product is None:
            more = [PREVIOUS] * (self._number > 0)
            more += [NEXT] * (len(self._results) > (self._number + 1) * self._per_page)
            return [BACK, *more, *(product.id for product in self._shown())]
        if self._section:
            return [BACK, PREVIOUS]
        values = [value for values in self._product.options.values() for value in values]
        return [BACK, PREVIOUS, *self._sections(self._product), *values, BUY]

    def _instruction(self) -> str:
        goal = self._begun()
        options = [f"{name} {value}" for name, value in goal.options.items()]
        if self._brief:
            return ", ".join((f"{' '.join(goal.attributes)} {goal.product.query}", *goal.options.values())) + (
                f", to ${goal.price_upper:.0f}"
            )
        return (
            f"You are in a web shop. Answer with search[words], or with click[...] of something in brackets.\n"
            f"Buy: {goal.product.query}. It must be {', '.join(goal.attributes)}; {', '.join(options)}; and cost at most "
            f"${goal.price_upper:.2f}."
        )

    def _page(self) -> str:
        """The page's text."""
        if self._results is None:
            return "search"
        if self._product is None:
            lines = [self._line(product) for product in self._shown()] or ["nothing found"]
        elif self._section:
            lines = [self._line(self._product), *self._sections(self._product)[self._section]]
        else:
            lines = [self._line(self._product), *map(self._option, self._product.options)]
        if self._brief:
            return "\n".join(lines)
        hidden = {product.id for product in self._shown()} | {v for o in self._options() for v in o}
        bar = " ".join(f"[{button}]" for button in self._buttons() if button not in hidden)
        head = f"Page {self._number + 1} of results for {self._query!r}, {len(self._results)} in all\n"
        return ("" if self._product else head) + "\n".join((*lines, bar))

    def _options(self) -> list[Sequence[str]]:
        return [list(values) for values in self._product.options.values()] if self._product else []

    def _line(self, product: Product) -> str:
        price = product.price_with(self._chosen) if product is self._product else product.price
        if self._brief:
            return f"{product.id} {product.title} ${price:.0f}"
        return f"[{product.id}] {product.title} ${price:.2f}"

    def _option(self, name: str) -> str:
        """A line of values; the chosen one is marked."""
        assert self._product is not None
        mine = self._chosen.get(name)
        if self._brief:
            return " ".join(f"({value})" if value == mine else value for value in self._product.options[name])
        extras = self._product.options[name].items()
        values = [f"[{v}]" + (f" +${e:.2f}" if e else "") + (" (chosen)" if v == mine else "") for v, e in extras]
        return f"{name}: {', '.join(values)}"

    def _state_key(self) -> str:
        """Names what the customer sees: two visits for one wish that show the same have the same key."""
        if self._results is None:
            return "search"
        if self._product is None:
            return f"results/{self._query}/{self._number}"
        options = ",".join(f"{name}={value}" for name, value in sorted(self._chosen.items()))
        return f"item/{self._product.id}/{self._section}/{options}"

    def _info(self, *, valid: bool, effective: bool) -> dict[str, Any]:
        return {"state_key": self._state_key(), "valid": valid, "effective": effective}
