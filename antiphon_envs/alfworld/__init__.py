"""Household tasks with the commands and answers of ALFWorld."""
