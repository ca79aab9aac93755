"""The reward of code by execution."""
