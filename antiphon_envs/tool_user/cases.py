"""Draw cases: a shop, a customer's request, and the right final state of the database."""

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from antiphon.core.rng import generator
from antiphon.core.types import ToolCall
from antiphon_envs.tool_user.generate import draw_address, draw_shop
from antiphon_envs.tool_user.shop import REASONS, RETURN_DAYS, Order, Shop


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomerRequest:
    """The request of a customer about one order, and what the rules allow."""

    text: str
    action: str = ""
    """Word that a request for confirmation must name; empty if nothing is to be changed."""
    answers: Mapping[str, str] = field(default_factory=dict)
    """Answers by topic, beyond those that every customer has."""
    change: ToolCall | None = None
    """The change that the rules allow; None if they allow none."""
    facts: tuple[str, ...] = ()
    """Facts that the customer must be told."""
    product: str = ""
    """Product whose variants must be looked up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A shop, one of its customers, and the right final state."""

    shop: Shop
    """The database that the tools change."""
    goal: Shop
    """The right final state of the database."""
    number: str
    """Number of the order."""
    email: str
    request: CustomerRequest
    answers: Mapping[str, str]
    """The customer's answers by topic."""
    insistent: bool
    """True if the customer does not take the first statement as final."""


def draw_case(seed: int) -> Case:
    """Draw the case of a seed."""
    random = generator(seed, "tool_user")
    shop = draw_shop(random)
    number = str(random.choice(list(shop.orders)))
    order = shop.orders[number]
    request = KINDS[str(random.choice(list(KINDS)))](shop, number, order, random)
    goal: Shop = pickle.loads(pickle.dumps(shop))  # a copy, ten times as fast as deepcopy
    if request.change:
        getattr(goal, request.change.name)(**request.change.arguments)
    email, item = shop.customers[order.customer].email, order.items[0].product
    knows_number = random.random() < 0.5
    described = (
        f"The number is {number}." if knows_number else f"I have no number here. It is the order with the {item}."
    )
    answers = {"email": f"It is {email}.", "order": described, "item": f"The {item}.", **request.answers}
    return Case(
        shop=shop,
        goal=goal,
        number=number,
        email=email,
        request=request,
        answers=answers,
        insistent=bool(random.random() < 0.5),
    )


# --- kinds of requests: each puts the order into a suitable state ------------------------------------------------------


def _draw_cancel(shop: Shop, number: str, order: Order, random: np.random.Generator) -> CustomerRequest:
    order.status, order.delivered_day = str(random.choice(["pending", "pending", "shipped"])), None
    reason = str(random.choice([*REASONS, "it is cheaper elsewhere"]))
    allowed = order.status == "pending" and reason in REASONS
    refusal = ("cannot", "shipped") if order.status == "shipped" else ("cannot",)
    return CustomerRequest(
        text="I want to cancel an order.",
        action="cancel",
        answers={"reason": f"The reason: {reason}."},
        change=ToolCall("cancel_order", {"order": number, "reason": reason}) if allowed else None,
        facts=(str(order.total()),) if allowed else refusal,
    )


def _draw_return(shop: Shop, number: str, order: Order, random: np.random.Generator) -> CustomerRequest:
    age = int(random.integers(1, 2 * RETURN_DAYS, endpoint=True))
    order.status, order.delivered_day = "delivered", shop.today - age
    item = order.items[0]
    allowed = age <= RETURN_DAYS
    return CustomerRequest(
        text=f"I want to return the {item.product} that I ordered.",
        action="return",
        change=ToolCall("return_item", {"order": number, "sku": item.sku}) if allowed else None,
        facts=(str(item.price),) if allowed else ("cannot", f"{RETURN_DAYS} days"),
    )


def _draw_exchange(shop: Shop, number: str, order: Order, random: np.random.Generator) -> CustomerRequest:
    order.status, order.delivered_day = "pending", None
    item = order.items[0]
    others = [sku for sku, each in shop.variants.items() if each.product == item.product and sku != item.sku]
    sku = str(random.choice(others))
    new = shop.variants[sku]
    change = ToolCall("exchange_item", {"order": number, "sku": item.sku, "new_sku": sku}) if new.stock else None
    return CustomerRequest(
        text=f"I want to exchange the {item.product} that I ordered for another variant.",
        action="exchange",
        answers={"variant": f"The {new.variant} one, please."},
        change=change,
        facts=(str(new.price),) if change else ("cannot", "stock"),
        product=item.product,
    )


def _draw_address_change(shop: Shop, number: str, order: Order, random: np.random.Generator) -> CustomerRequest:
    order.status, order.delivered_day = str(random.choice(["pending", "shipped"])), None
    address = draw_address(random)
    pending = order.status == "pending"
    return CustomerRequest(
        text="I want an order to be sent to another address.",
        action="address",
        answers={"address": f"The new address is {address}"},
        change=ToolCall("change_address", {"order": number, "address": address}) if pending else None,
        facts=() if pending else ("cannot", "shipped"),
    )


def _draw_total(shop: Shop, number: str, order: Order, random: np.random.Generator) -> CustomerRequest:
    return CustomerRequest(text="I want to know how much I paid for an order in all.", facts=(str(order.total()),))


KINDS: Mapping[str, Callable[[Shop, str, Order, np.random.Generator], CustomerRequest]] = {
    "cancel": _draw_cancel,
    "return": _draw_return,
    "exchange": _draw_exchange,
    "address": _draw_address_change,
    "total": _draw_total,
}
