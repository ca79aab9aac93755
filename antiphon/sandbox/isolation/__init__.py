"""Levels of isolation that the kernel offers, and processes confined by them."""
