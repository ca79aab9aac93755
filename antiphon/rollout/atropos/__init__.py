"""Environments of Atropos (package atroposlib): one process runs them, and its requests are those of a group's attempts."""
