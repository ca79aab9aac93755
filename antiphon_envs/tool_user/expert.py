"""The expert of customer service: a script that asks, looks up, has a change confirmed, makes it, tells, and ends."""

from collections.abc import Collection
from dataclasses import dataclass, field

from antiphon.core.types import ToolCall
from antiphon_envs.tool_user.cases import Case

END = ToolCall("end_conversation", {})
QUESTIONS = {
    "email": "What is your email address?",
    "order": "What is your order number?",
    "reason": "What is the reason?",
    "address": "What is the new address?",
    "variant": "Which variant do you want?",
    "item": "Which item is it?",
}
"""By topic."""


@dataclass(slots=True)
class Progress:
    """The progress of a conversation."""

    customer: str = ""
    """Id of the customer who was found."""
    confirmed: bool = False
    """True if the customer confirmed the next change."""
    seen: set[str] = field(default_factory=set)
    """Orders and products that were looked up."""
    told: set[str] = field(default_factory=set)
    """Facts that the customer was told."""
    changes: list[ToolCall] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


def next_action(case: Case, asked: Collection[str], progress: Progress) -> str | ToolCall:
    """Return the next message or call; `asked` are the topics that the customer has answered."""
    request = case.request
    missing = [topic for topic in ("email", "order", *request.answers) if topic not in asked]
    if missing and (missing[0] == "email" or progress.customer):
        return QUESTIONS[missing[0]]
    if not progress.customer:
        return ToolCall("find_customer", {"email": case.email})
    if case.number not in progress.seen:
        unseen = (number for number in case.shop.orders_of(progress.customer) if number not in progress.seen)
        number = case.number if case.number in case.answers["order"] else next(unseen)
        return ToolCall("get_order", {"order": number})
    if request.product and request.product not in progress.seen:
        return ToolCall("find_variants", {"product": request.product})
    if request.change and case.shop != case.goal:
        question = f"I {request.action} it as you wish: order {case.number}. Do you confirm?"
        return request.change if progress.confirmed else question
    if progress.told < set(request.facts):
        return f"About order {case.number}: {', '.join(request.facts)}."
    return END
