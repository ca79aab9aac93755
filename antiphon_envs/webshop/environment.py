"""A shop to buy from, after WebShop (Yao et al., 2022), with products of its own or the published ones."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from antiphon.core.registry import import_path
from antiphon.tasks.base import Reset, Step
from antiphon.tasks.environments.actions import extract_answer, match_action
from antiphon.tasks.environments.base import BaseEnvironment, EnvironmentConfig, EpisodeError, require
from antiphon_envs.webshop.browser import BACK, BUY, NEXT, PREVIOUS, Browser
from antiphon_envs.webshop.catalogue import Catalogue, Goal, Product
from antiphon_envs.webshop.catalogues import load_catalogue
from antiphon_envs.webshop.published import load_published
from antiphon_envs.webshop.rendering import render_goal, render_page
from antiphon_envs.webshop.reward import Nouns, import_rapidfuzz, score_purchase
from antiphon_envs.webshop.tiny_catalogue import MOST_PRODUCTS

_ACTION = re.compile(r"(search|click)\[(.*)\]", re.DOTALL | re.IGNORECASE)


class WebShop(BaseEnvironment):
    """A visit to the shop for a customer who wants a product with attributes, options and a bound on its price.

    Actions are `search[words]` on the first page and `click[...]` of a button. Buying ends the visit with the reward of the
    paper (`reward.score_purchase`); everything else earns 0, and so does running out of turns. `info["success"]` is True for a
    reward of 1.
    """

    class Config(EnvironmentConfig):
        """Options of `webshop`."""

        items: str = ""
        """File of products as WebShop publishes them (`items_shuffle.json`); empty: products of our own."""
        attributes: str = ""
        """File of the attributes of these products (`items_ins_v2.json`), with instructions that were made from them."""
        goals: str = ""
        """File of instructions that people wrote (`items_human_ins.json`); empty: those of `attributes`."""
        size: Literal["full", "tiny"] = "full"
        """The catalogue; `tiny` has 24 products and short texts, for models of characters."""
        products: int = Field(0, ge=0)
        """Number of products; 0 is the default of the catalogue, all of a file."""
        shop: int = 0
        """Seed of the catalogue."""
        turns: int = Field(15, ge=1)
        """Turns after which the episode is truncated."""
        format_penalty: float = Field(0.0, ge=0)
        """Cost of an action that cannot be parsed."""
        nouns: str = ""
        """package.module:function that returns the nouns of a title, instead of a list of them."""

        @model_validator(mode="after")
        def _check(self) -> Self:
            most = MOST_PRODUCTS if self.size == "tiny" else self.products
            require(self.products <= most, "products", self.products, f"1 to {most} in a tiny shop, or 0")
            require(
                bool(self.items) == bool(self.attributes), "attributes", self.attributes, "a file, together with items"
            )
            require(bool(self.items) or not self.goals, "goals", self.goals, "a file together with items, or nothing")
            require(not self.items or self.size == "full", "size", self.size, "full, with items")
            return self

    config: Config
    name: ClassVar[str] = "webshop"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        config = self.config
        import_rapidfuzz()  # so that it is missed now, not at the purchase
        if config.items:
            files = config.items, config.attributes, config.goals
            self._catalogue: Catalogue = load_published(*files, config.products, config.shop)
        else:
            self._catalogue = load_catalogue(config.size, config.products, config.shop)
        self._brief = config.size == "tiny"
        self._nouns: Nouns = import_path(config.nouns, "nouns") if config.nouns else self._catalogue.nouns
        self._goal: Goal | None = None
        self._new_browser()

    def reset(self, seed: int) -> Reset:
        """Begin a visit; the customer's goal depends on `seed` only: of published ones it is the number."""
        self._goal = self._catalogue.goal(seed)
        self._turns_left = self.config.turns
        self._new_browser()
        observation = f"{render_goal(self._goal, self._brief)}\n{render_page(self._browser, self._brief)}"
        return observation, self._info(valid=True, effective=True)

    def step(self, action: str) -> Step:
        """Search or click."""
        self._check_running()
        self._turns_left -= 1
        parsed = _ACTION.fullmatch(extract_answer(action))
        if parsed is None:
            return self._end_turn("This is no action.", -self.config.format_penalty, valid=False, effective=False)
        browser, before = self._browser, self._browser.state_key()
        if parsed[1].lower() == "search":
            valid = browser.search(parsed[2])
        else:
            button = match_action(parsed[2], browser.buttons())
            if button == BUY and browser.product is not None:
                return self._buy(browser.product)
            valid = button is not None
            if button is not None:
                browser.click(button)
        remark, effective = "" if valid else "Not here.", browser.state_key() != before
        return self._end_turn(remark, 0.0, valid=valid, effective=effective)

    def actions(self) -> Sequence[str]:
        """Return all clicks of the page; on the search page, searches for the goal with more or fewer words."""
        goal = self._current_goal()
        if self._browser.results is None:
            kind = goal.product.query
            return [f"search[{kind}]", *(f"search[{attribute} {kind}]" for attribute in goal.attributes)]
        return [f"click[{button}]" for button in self._browser.buttons()]

    def expert(self) -> str:
        """Return an action that leads to buying the product that the goal was made from."""
        goal = self._current_goal()
        if self._browser.results is None:
            return f"search[{goal.product.title}]"
        return f"click[{self._expert_click(goal)}]"

    def _expert_click(self, goal: Goal) -> str:
        browser, buttons = self._browser, self._browser.buttons()
        if browser.product is None:
            return next(each for each in (goal.product.id, NEXT, BACK) if each in buttons)
        if browser.product != goal.product:
            return BACK
        if browser.section:
            return PREVIOUS
        wanted = {name: value for name, value in goal.options.items() if value in goal.product.options.get(name, ())}
        return next((value for name, value in wanted.items() if browser.selected.get(name) != value), BUY)

    def _new_browser(self) -> None:
        self._browser = Browser(self._catalogue, per_page=3 if self._brief else 10, with_sections=not self._brief)

    def _buy(self, product: Product) -> Step:
        goal, selected = self._current_goal(), self._browser.selected
        score = score_purchase(goal, product, selected, self._nouns, self._catalogue.colors)
        self._turns_left = 0
        info = self._info(valid=True, effective=True) | {"success": score.value == 1.0, "parts": asdict(score)}
        return f"Bought. Reward: {score.value:.2f}", score.value, True, False, info

    def _end_turn(self, remark: str, reward: float, *, valid: bool, effective: bool) -> Step:
        over, page = not self._turns_left, render_page(self._browser, self._brief)
        info = self._info(valid=valid, effective=effective) | ({"success": False} if over else {})
        return f"{remark}\n{page}" if remark else page, reward, False, over, info

    def _current_goal(self) -> Goal:
        if self._goal is None:
            raise EpisodeError("the episode has not begun: call reset first")
        return self._goal

    def _info(self, *, valid: bool, effective: bool) -> dict[str, Any]:
        return {"state_key": self._browser.state_key(), "valid": valid, "effective": effective}
