"""Navigation in the shop: the page that a customer is on, its buttons, and where they lead."""

from collections.abc import Sequence

from antiphon_envs.webshop.catalogue import Catalogue, Product

BACK, NEXT, PREVIOUS, BUY = "back to search", "next >", "< prev", "buy now"
MOST_RESULTS = 50  # of a search


class Browser:
    """The state of a visit: the search page, a page of results, or a product with its sections and selected options."""

    def __init__(self, catalogue: Catalogue, per_page: int, with_sections: bool) -> None:
        """Begin on the search page.

        Args:
            catalogue: The products of the shop.
            per_page: Results on a page.
            with_sections: Give products pages with description, features, reviews and attributes.
        """
        self._catalogue = catalogue
        self._per_page = per_page
        self._with_sections = with_sections
        self.go_to_search()

    def go_to_search(self) -> None:
        """Go to the search page and forget the results."""
        self.query = ""
        self.results: list[Product] | None = None  # None on the search page
        self.page = 0  # of the results
        self._leave_product()

    def _leave_product(self) -> None:
        self.product: Product | None = None
        self.section = ""  # of the product
        self.selected: dict[str, str] = {}  # options of the product

    def search(self, query: str) -> bool:
        """Search for products; return False if the page has no search field."""
        if self.results is not None:
            return False
        self.query = " ".join(query.lower().split())
        self.results = self._catalogue.search(self.query, MOST_RESULTS)
        return True

    def click(self, button: str) -> None:
        """Click one of `buttons()`, except `BUY`."""
        if button == BACK:
            self.go_to_search()
        elif self.product is None:
            self._click_result(button)
        elif button == PREVIOUS:
            if self.section:
                self.section = ""
            else:
                self._leave_product()
        elif button in self.sections(self.product):
            self.section = button
        else:
            name = next(name for name, values in self.product.options.items() if button in values)
            self.selected[name] = button

    def _click_result(self, button: str) -> None:
        if button in (NEXT, PREVIOUS):
            self.page += 1 if button == NEXT else -1
        else:
            self.product = next(product for product in self.listed() if product.id == button)

    def listed(self) -> list[Product]:
        """Return the products on the current page of results."""
        first = self.page * self._per_page
        return (self.results or [])[first : first + self._per_page]

    def sections(self, product: Product) -> dict[str, Sequence[str]]:
        """Return the sections of a product and their lines."""
        texts: dict[str, Sequence[str]] = {
            "description": [product.description] if product.description else [],
            "features": product.bullets,
            "reviews": product.reviews,
            "attributes": product.attributes,
        }
        return {name: lines for name, lines in texts.items() if lines} if self._with_sections else {}

    def buttons(self) -> list[str]:
        """Return everything that can be clicked on the current page."""
        if self.results is None:
            return []
        if self.product is None:
            more = [PREVIOUS] * (self.page > 0)
            more += [NEXT] * (len(self.results) > (self.page + 1) * self._per_page)
            return [BACK, *more, *(product.id for product in self.listed())]
        if self.section:
            return [BACK, PREVIOUS]
        values = [value for values in self.product.options.values() for value in values]
        return [BACK, PREVIOUS, *self.sections(self.product), *values, BUY]

    def state_key(self) -> str:
        """Return a name of what the customer sees."""
        if self.results is None:
            return "search"
        if self.product is None:
            return f"results/{self.query}/{self.page}"
        options = ",".join(f"{name}={value}" for name, value in sorted(self.selected.items()))
        return f"item/{self.product.id}/{self.section}/{options}"
