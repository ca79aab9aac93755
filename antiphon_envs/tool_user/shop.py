"""The shop whose customers the policy serves: its database, the tools that read and write it, and its rules.

The tools also run calls that break a rule; `Shop.broken_rule` names it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from antiphon.tasks.environments.tools.toolbox import ToolError

REASONS = ("no longer needed", "ordered by mistake")
RETURN_DAYS = 30

RULES = f"""You serve the customers of a shop. These are its rules:
1. Ask for the email address and find the customer by it before you look at an order. Serve nobody else's orders.
2. Before each change say what you will do, with the number of the order, and ask whether the customer confirms it.
3. Only a pending order can be cancelled, and only because it is {REASONS[0]!r} or {REASONS[1]!r}. Tell the amount that is
   refunded, which is all that was paid.
4. An item of a delivered order can be returned up to {RETURN_DAYS} days after its delivery. Tell the amount that is refunded.
5. An item of a pending order can be exchanged for another variant of the same product that is in stock. Tell its price.
6. The address of an order can be changed while it is pending.
7. Whatever else a customer asks for: look at the order, then say that it cannot be done, and why. If the reason is the state of
   the order, name it. Name no reason that does not hold.
Amounts are whole dollars."""


@dataclass(slots=True)
class Variant:
    """A variant of a product."""

    product: str
    variant: str
    price: int
    stock: int


@dataclass(slots=True)
class Item:
    """A line of an order."""

    sku: str
    product: str
    variant: str
    price: int
    returned: bool = False


@dataclass(slots=True)
class Order:
    """An order. `status` is pending, shipped, delivered or cancelled."""

    customer: str
    status: str
    address: str
    items: list[Item]
    delivered_day: int | None = None
    cancel_reason: str = ""
    refunded: int = 0

    def total(self) -> int:
        """Return the amount that was paid."""
        return sum(item.price for item in self.items)

    def item(self, sku: str) -> Item:
        """Return an item; `ToolError` if it is not in the order."""
        found = next((item for item in self.items if item.sku == sku), None)
        if found is None:
            raise ToolError(f"the order has no item {sku}")
        return found


@dataclass(slots=True)
class Customer:
    """A customer with an account."""

    name: str
    email: str


@dataclass(slots=True)
class Shop:
    """The database of the shop."""

    today: int
    """Days since the shop was opened."""
    customers: dict[str, Customer] = field(default_factory=dict)
    orders: dict[str, Order] = field(default_factory=dict)
    variants: dict[str, Variant] = field(default_factory=dict)

    # --- tools: the policy reads their docstrings --------------------------------------------------------------------------

    def find_customer(self, email: str) -> dict[str, Any]:
        """The customer with this email address, and the numbers of their orders."""
        for id, customer in self.customers.items():
            if customer.email == email.strip().lower():
                return {"customer": id, "name": customer.name, "orders": self.orders_of(id)}
        raise ToolError("there is no customer with this email address")

    def get_order(self, order: str) -> dict[str, Any]:
        """All that is known of the order with this number. Days are counted; `today` is one, too."""
        found = self.order(order)
        return {"order": order, "today": self.today, "total": found.total(), **asdict(found)}

    def find_variants(self, product: str) -> list[dict[str, Any]]:
        """The variants of a product, their prices, and how many are in stock."""
        found = [
            {"sku": sku, **asdict(each)}
            for sku, each in self.variants.items()
            if each.product == product.strip().lower()
        ]
        if not found:
            raise ToolError(f"there is no product {product}")
        return found

    def cancel_order(self, order: str, reason: str) -> str:
        """Cancel an order and refund all that was paid for it."""
        found = self.order(order)
        found.status, found.cancel_reason, found.refunded = "cancelled", reason, found.total()
        return f"cancelled, {found.refunded} refunded"

    def return_item(self, order: str, sku: str) -> str:
        """Take an item of an order back and refund its price."""
        found = self.order(order)
        item = found.item(sku)
        if not item.returned:
            item.returned = True
            found.refunded += item.price
        return f"returned, {item.price} refunded"

    def exchange_item(self, order: str, sku: str, new_sku: str) -> str:
        """Put another variant into an order in place of an item."""
        found, new = self.order(order), self.variant(new_sku)
        old = found.item(sku)
        found.items[found.items.index(old)] = Item(new_sku, new.product, new.variant, new.price)
        if sku in self.variants:
            self.variants[sku].stock += 1
        new.stock -= 1
        return f"exchanged, the new item costs {new.price}"

    def change_address(self, order: str, address: str) -> str:
        """Have an order sent to another address."""
        self.order(order).address = address.strip()
        return "changed"

    # --- rules -------------------------------------------------------------------------------------------------------------

    def order(self, number: str) -> Order:
        """Return an order; `ToolError` if there is none with this number."""
        if number not in self.orders:
            raise ToolError(f"there is no order {number}")
        return self.orders[number]

    def orders_of(self, customer: str) -> list[str]:
        """Return the numbers of a customer's orders."""
        return [number for number, order in self.orders.items() if order.customer == customer]

    def variant(self, sku: str) -> Variant:
        """Return a variant; `ToolError` if there is none."""
        if sku not in self.variants:
            raise ToolError(f"there is no item {sku}")
        return self.variants[sku]

    def broken_rule(self, change: str, arguments: Mapping[str, str]) -> str:
        """Return the rule that a change would break now; an empty string if none."""
        order = self.order(arguments["order"])
        if change == "return_item":
            late = order.delivered_day is None or self.today - order.delivered_day > RETURN_DAYS
            again = order.item(arguments["sku"]).returned
            return "rule 4" if order.status != "delivered" or late or again else ""
        if order.status != "pending":
            return f"the order is {order.status}"
        if change == "cancel_order":
            return "" if arguments["reason"] in REASONS else "rule 3"
        if change == "exchange_item":
            new, old = self.variant(arguments["new_sku"]), order.item(arguments["sku"])
            return "" if new.product == old.product and new.stock > 0 else "rule 5"
        return ""


CHANGES = ("cancel_order", "return_item", "exchange_item", "change_address")
READS = ("find_customer", "get_order", "find_variants")
