"""WebShop: find and buy a product."""
