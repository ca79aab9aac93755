"""Customer service with tools over a database."""
