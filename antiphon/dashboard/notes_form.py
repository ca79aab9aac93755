"""The one request that writes: notes and tags of a run, into a file of their own in its directory."""

import asyncio
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from antiphon.core.errors import ConfigError
from antiphon.dashboard.errors import RequestError
from antiphon.dashboard.rendering import Templates
from antiphon.dashboard.site import Site
from antiphon.record.notes import write_notes

MOST_BODY = 1 << 17  # bytes; a character takes up to 12 of them in a form
FORM = "application/x-www-form-urlencoded"


class BodyTooLargeError(RequestError):
    """The body of a request is larger than any valid one."""

    status = 413


class MediaTypeError(RequestError):
    """The body of a request is no form."""

    status = 415


def answer_notes(site: Site, templates: Templates) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler of `POST /notes/RUN` with the fields `tags`, between commas, and `text`. The door checks who asks."""

    async def answer(request: Request) -> Response:
        name = request.path_params["name"]
        run = site.folder.find(name)
        fields = await _read_form(request)
        if not {"tags", "text"} <= fields.keys():
            raise RequestError("the fields tags and text are needed")
        try:
            await asyncio.to_thread(write_notes, run, fields["tags"].split(","), fields["text"])
        except ConfigError as error:
            raise RequestError(str(error)) from error
        return RedirectResponse(f"{templates.url('/run/', name)}#notes", 303)

    return answer


async def _read_form(request: Request) -> dict[str, str]:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
        raise MediaTypeError(f"the body must be {FORM}")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BODY:
            raise BodyTooLargeError(f"the body has more than {MOST_BODY:,} bytes")
    try:
        return dict(parse_qsl(body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=8))
    except ValueError as error:
        raise RequestError("the body is no form in UTF-8") from error
