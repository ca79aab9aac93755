"""Sandboxes that keep their state between commands: shells, files and network egress."""
