"""Checks of rewards before a run, attacks on them, and flags of reward hacking."""
