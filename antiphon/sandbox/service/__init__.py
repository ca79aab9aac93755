"""The sandbox service: an HTTP API over sessions, with quotas, records and a warm pool."""
