"""Adapters to environments of other libraries, one file a library."""
