"""Sokoban: push boxes to targets."""
