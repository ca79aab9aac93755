"""The queries of the pages. Each returns a frozen record: the page shows it, and `/api` gives it as JSON."""
