"""Data sets as files of rows: what they have in common, and how to choose rows of them."""
