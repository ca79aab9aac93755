"""Where workers run: local processes or Ray, and their placement on cores and devices."""
