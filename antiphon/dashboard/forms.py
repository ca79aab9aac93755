"""The bodies of requests that send a form: bounded, and in UTF-8."""

from urllib.parse import parse_qsl

from starlette.requests import Request

from antiphon.dashboard.errors import RequestError

MOST_BODY = 1 << 17  # bytes; a character takes up to 12 of them in a form
MOST_FIELDS = 8
FORM = "application/x-www-form-urlencoded"


class BodyTooLargeError(RequestError):
    """The body of a request is larger than any valid one."""

    status = 413


class MediaTypeError(RequestError):
    """The body of a request is no form."""

    status = 415


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form; raise `RequestError` if the body is none, or too large."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
        raise MediaTypeError(f"the body must be {FORM}")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BODY:
            raise BodyTooLargeError(f"the body has more than {MOST_BODY:,} bytes")
    try:
        return dict(
            parse_qsl(body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MOST_FIELDS)
        )
    except ValueError as error:
        raise RequestError("the body is no form in UTF-8") from error
