"""One training run: its configuration, how it is built and launched, and its loop."""
