"""Countdown: reach a number by arithmetic."""
