"""The web page over run directories. It reads `inspect`, `record` and `core` alone, and training never imports it."""
