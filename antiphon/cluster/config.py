"""Configuration of where things run. Importing it imports no torch."""

from antiphon.config import Config


class ClusterConfig(Config):
    """Workers of a run."""

    kind: str = "local"
    """`local`, `ray`, or package.module:attribute."""
    address: str = ""
    """Of a Ray that runs on this machine: host:port, or `auto` to find it. Without one, a Ray is started, and in the end
    stopped."""
    debug: bool = False
    """Run engine and learner as threads of this process, so that breakpoints work."""
