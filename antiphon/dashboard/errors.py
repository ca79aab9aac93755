"""Errors of requests, which become a page or JSON with their HTTP status."""

from antiphon.core.errors import AntiphonError


class RequestError(AntiphonError):
    """A request that cannot be answered; `status` is that of HTTP."""

    status = 400


class NotFoundError(RequestError):
    """There is no such run, attempt or page."""

    status = 404
