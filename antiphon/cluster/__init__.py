"""Start workers as local processes or with Ray, and place them on cores and devices."""
