"""Answers to questions about a run from its directory: audit, why, diff, replay, regrade, export; doctor."""
