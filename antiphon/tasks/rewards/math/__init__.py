"""Rewards of mathematical answers."""
