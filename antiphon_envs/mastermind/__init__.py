"""Mastermind: find a code from the answers to guesses."""
