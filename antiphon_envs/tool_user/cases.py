"""Customers of the shop and what they want: a case is drawn from a seed, and its customer answers by a script."""

import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from antiphon.core.rng import generator
from antiphon.core.types import ToolCall
from antiphon_envs.tool_user.shop import REASONS, RETURN_DAYS, Order, Shop, draw_address, draw_shop


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomerRequest:
    """What a customer wants of one order, and what becomes of it by the rules."""

    text: str
    action: str = ""
    """The word without which a question is not about it; empty if nothing is to be changed."""
    answers: Mapping[str, str] = field(default_factory=dict)
    """By topic, beyond those that every customer has."""
    change: ToolCall | None = None
    """What the rules allow; None if they allow nothing."""
    facts: tuple[str, ...] = ()
    """What the customer has to be told."""
    product: str = ""
    """Whose variants have to be looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A shop, a customer of it, and what is right in the end."""

    shop: Shop
    """The database, which the policy's tools change."""
    goal: Shop
    """As it should become."""
    number: str
    """Of the order."""
    email: str
    wish: CustomerRequest
    answers: Mapping[str, str]
    """What the customer says when asked, by topic."""
    insistent: bool
    """Whether the customer asks again when told of something."""


TOPICS = {  # what a question is about; of several all are answered
    "email": re.compile(r"e-?mail"),
    "order": re.compile(r"\b(which|what|your) order\b|order (number|id)|number of (the|your) order"),
    "reason": re.compile(r"\bwhy\b|\breason\b"),
    "address": re.compile(r"(?<!mail )\baddress\b"),
    "variant": re.compile(r"\bvariant\b|\bcolou?r\b"),
    "item": re.compile(r"\b(which|what) (item|product)\b"),
}
_CONFIRM = re.compile(r"\bconfirm|\bgo ahead\b|\bproceed\b|\bshall i\b|\bagree\b")


_WORDINGS = {  # of facts that are no amounts
    "cannot": r"cannot|can'?t|can not|unable|impossible|not (possible|allowed|able|eligible|permitted)",
    "shipped": r"shipped|on its way",
    "stock": r"stock|sold out|unavailable|not available",
    f"{RETURN_DAYS} days": rf"{RETURN_DAYS}[- ]days?",
}


def mentions_fact(fact: str, message: str) -> bool:
    """Whether a message tells a fact.

    >>> is_told("12", "You get $12 back."), is_told("12", "Order 1234 cost 12.50.")
    (True, False)
    """
    heard = message.lower().replace(",", "").replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    return re.search(rf"(?<![\w.])({_WORDINGS.get(fact, re.escape(fact))})(?!\w|\.[1-9]|\.\d[1-9])", heard) is not None


class Customer:
    """Answers what is asked, says yes to what was wished for, and begins with the wish."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.insists = case.insistent
        """Whether the next statement is not taken as the last word."""
        self.asked: set[str] = set()
        """The topics that were answered."""
        self.agreed = False
        """Whether the last thing said was a yes."""

    def greet(self) -> str:
        """What the customer begins with."""
        return self._case.wish.text

    def answer(self, message: str) -> str:
        """The reply to a message; a question is what has a question mark."""
        text = message.lower()
        self.agreed = False
        if "?" not in text:
            if self.insists:
                self.insists = False
                return "Are you sure? Please see what you can do for me."
            return "All right."
        if _CONFIRM.search(text) and self._case.wish.action:
            return self._confirm(text)
        topics = [topic for topic, about in TOPICS.items() if about.search(text)]
        self.asked.update(topics)
        said = [self._case.answers.get(topic, "I cannot say more about that.") for topic in topics]
        return " ".join(said) or f"I do not understand. {self._case.wish.text}"

    def _confirm(self, text: str) -> str:
        if self._case.number not in text:
            return "Of which order? Tell me its number."
        if self._case.wish.action not in text:
            return f"No. {self._case.wish.text}"
        self.agreed = True
        return "Yes, I confirm."


def draw_case(seed: int) -> Case:
    """The case of this seed."""
    random = generator(seed, "tool_user")
    shop = draw_shop(random)
    number = str(random.choice(list(shop.orders)))
    order = shop.orders[number]
    wish = KINDS[str(random.choice(list(KINDS)))](shop, number, order, random)
    goal: Shop = pickle.loads(pickle.dumps(shop))  # a copy, in a tenth of the time that deepcopy takes
    if wish.change:
        getattr(goal, wish.change.name)(**wish.change.arguments)
    email, item = shop.customers[order.customer].email, order.items[0].product
    known = random.random() < 0.5
    described = f"The number is {number}." if known else f"I have no number here. It is the order with the {item}."
    answers = {"email": f"It is {email}.", "order": described, "item": f"The {item}.", **wish.answers}
    return Case(
        shop=shop,
        goal=goal,
        number=number,
        email=email,
        wish=wish,
        answers=answers,
        insistent=bool(random.random() < 0.5),
    )


# --- kinds of wishes: each puts the order into the state it is about ----------------------------------------------------------


def _cancel(shop: Shop, number: str, order: Order, random: np.random.Generator) -> CustomerRequest:
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


def _return(shop: Shop, number: str, order: Order, random: np.random.Generator) -> CustomerRequest:
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


def _exchange(shop: Shop, number: str, order: Order, random: np.random.Generator) -> CustomerRequest:
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


def _move(shop: Shop, number: str, order: Order, random: np.random.Generator) -> CustomerRequest:
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


def _total(shop: Shop, number: str, order: Order, random: np.random.Generator) -> CustomerRequest:
    return CustomerRequest(text="I want to know how much I paid for an order in all.", facts=(str(order.total()),))


KINDS: Mapping[str, Callable[[Shop, str, Order, np.random.Generator], CustomerRequest]] = {
    "cancel": _cancel,
    "return": _return,
    "exchange": _exchange,
    "address": _move,
    "total": _total,
}
