"""Configuration of where things run. Importing it imports no torch."""

from antiphon.config import Config


class ClusterConfig(Config):
    """Workers of a run."""

    kind: str = "local"
    debug: bool = False
    """Run engine and learner as threads of this process, so that breakpoints work."""
