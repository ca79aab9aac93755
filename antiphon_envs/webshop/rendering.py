"""The text of the shop's pages and of a customer's goal; `brief` texts are for models of characters."""

from antiphon_envs.webshop.browser import Browser
from antiphon_envs.webshop.catalogue import Goal, Product


def render_goal(goal: Goal, brief: bool) -> str:
    """Write the instruction that a visit begins with."""
    if brief:
        wanted = (f"{' '.join(goal.attributes)} {goal.product.query}", *goal.options.values())
        return f"{', '.join(wanted)}, to ${goal.price_upper:.0f}"
    options = ", ".join(f"{name} {value}" for name, value in goal.options.items())
    request = goal.instruction or (
        f"Buy: {goal.product.query}. It must be {', '.join(goal.attributes)}; {options}; and cost at most "
        f"${goal.price_upper:.2f}."
    )
    return f"You are in a web shop. Answer with search[words], or with click[...] of something in brackets.\n{request}"


def render_page(browser: Browser, brief: bool) -> str:
    """Write the current page."""
    if browser.results is None:
        return "search"
    product = browser.product
    if product is None:
        lines = [_title_line(browser, each, brief) for each in browser.listed()] or ["nothing found"]
    elif browser.section:
        lines = [_title_line(browser, product, brief), *browser.sections(product)[browser.section]]
    else:
        options = (_option_line(browser, product, name, brief) for name in product.options)
        lines = [_title_line(browser, product, brief), *options]
    if brief:
        return "\n".join(lines)
    values = {value for values in product.options.values() for value in values} if product else set()
    hidden = {each.id for each in browser.listed()} | values
    bar = " ".join(f"[{button}]" for button in browser.buttons() if button not in hidden)
    head = f"Page {browser.page + 1} of results for {browser.query!r}, {len(browser.results)} in all\n"
    return ("" if product else head) + "\n".join((*lines, bar))


def _title_line(browser: Browser, product: Product, brief: bool) -> str:
    price = product.price_with(browser.selected) if product is browser.product else product.price
    return f"{product.id} {product.title} ${price:.0f}" if brief else f"[{product.id}] {product.title} ${price:.2f}"


def _option_line(browser: Browser, product: Product, name: str, brief: bool) -> str:
    """Write the values of an option; the selected one is marked."""
    selected = browser.selected.get(name)
    if brief:
        return " ".join(f"({value})" if value == selected else value for value in product.options[name])
    values = [
        f"[{value}]" + (f" +${extra:.2f}" if extra else "") + (" (chosen)" if value == selected else "")
        for value, extra in product.options[name].items()
    ]
    return f"{name}: {', '.join(values)}"
