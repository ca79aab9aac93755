"""Advantages, losses and their settings, as pure functions of arrays."""
