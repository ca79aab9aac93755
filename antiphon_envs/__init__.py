"""Worlds for Antiphon, found by entry points `antiphon.environments`."""
