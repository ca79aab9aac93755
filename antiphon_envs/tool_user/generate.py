"""Draw shops: their variants, customers and orders."""

import numpy as np

from antiphon_envs.tool_user.shop import Customer, Item, Order, Shop, Variant

CUSTOMERS = 6


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


_FIRST_NAMES = _split("ada,bert,clara,dora,emil,frida,gustav,hanna,ivar,jonas,karin,linus")
_LAST_NAMES = _split("ahlberg,brandt,carlsen,dahl,ekman,falk,grip,holm,isaksen,jansson")
_PRODUCTS = _split("lamp,kettle,blanket,backpack,clock,umbrella,teapot,scarf,mirror,lantern")
_VARIANTS = _split("red,blue,green,black,white")
_STREETS = _split("Mill Lane,Harbour Street,Oak Road,Station Square,Church Hill,Garden Row")


def draw_shop(random: np.random.Generator) -> Shop:
    """Draw a shop whose customers have three orders each, of different products."""
    shop = Shop(today=int(random.integers(400, 800)))
    for product in _PRODUCTS:
        base = int(random.integers(12, 90))
        steps = random.permutation(len(_VARIANTS))
        for number, variant in enumerate(_VARIANTS):
            stock = int(random.integers(0, 3)) and int(random.integers(1, 20))  # a third is out of stock
            shop.variants[f"{product}-{variant}"] = Variant(product, variant, base + 3 * int(steps[number]), stock)
    numbers = [str(number) for number in random.choice(9000, 3 * CUSTOMERS, replace=False) + 1000]
    for index, first in enumerate(random.choice(_FIRST_NAMES, CUSTOMERS, replace=False)):
        last = str(random.choice(_LAST_NAMES))
        shop.customers[f"c{index}"] = Customer(
            f"{first} {last}".title(), f"{first}.{last}{int(random.integers(10, 99))}@mail.example"
        )
        products = random.permutation(_PRODUCTS)
        for order in range(3):
            mine = products[2 * order : 2 * order + 1 + int(random.integers(2))]
            shop.orders[numbers[3 * index + order]] = _draw_order(shop, f"c{index}", list(map(str, mine)), random)
    return shop


def draw_address(random: np.random.Generator) -> str:
    """Draw a street and a number."""
    return f"{random.choice(_STREETS)} {int(random.integers(1, 90))}"


def _draw_order(shop: Shop, customer: str, products: list[str], random: np.random.Generator) -> Order:
    items = []
    for product in products:
        sku = f"{product}-{random.choice(_VARIANTS)}"
        items.append(Item(sku, product, shop.variants[sku].variant, shop.variants[sku].price))
    status = str(random.choice(["pending", "shipped", "delivered"]))
    day = shop.today - int(random.integers(1, 90)) if status == "delivered" else None
    return Order(customer, status, draw_address(random), items, day)
