"""Why the service does not do what it was asked."""

from enum import StrEnum

from antiphon.core.errors import SandboxError


class Reason(StrEnum):
    """Of a refusal."""

    INPUT = "input"
    """What was asked for means nothing, or cannot be had here."""
    UNKNOWN = "unknown"
    """There is no such sandbox, session, environment or file."""
    STATE = "state"
    """It is there, but not in a state to do this."""
    QUOTA = "quota"
    """Too much is in use already; asking later may help."""
    LOST = "lost"
    """It ended before it could answer: nothing is known of what was under way."""
    FAILED = "failed"
    """It tried, and could not."""


class Refused(SandboxError):
    """A request that is not done; the message is for whoever asked."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
