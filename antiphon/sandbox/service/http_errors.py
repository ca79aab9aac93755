"""The error of a request that the service refuses, and its reasons."""

from enum import StrEnum

from antiphon.core.errors import SandboxError


class Reason(StrEnum):
    """Reason of a refusal."""

    INPUT = "input"
    """The request is invalid, or asks for something that this service does not offer."""
    UNKNOWN = "unknown"
    """There is no such sandbox, session, environment or file."""
    STATE = "state"
    """Its state does not allow the request."""
    QUOTA = "quota"
    """A quota is used up; the same request may succeed later."""
    LOST = "lost"
    """It ended before it could answer. What was under way may or may not have been done."""
    UNREACHABLE = "unreachable"
    """The host that holds it does not answer now. What was under way may or may not have been done."""
    FAILED = "failed"
    """The attempt failed."""


class RefusedError(SandboxError):
    """A request that is refused. The message goes to the client."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
