"""The one request that writes into a run: notes and tags of a run, into a file of their own in its directory."""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from antiphon.core.errors import ConfigError
from antiphon.dashboard.errors import RequestError
from antiphon.dashboard.forms import read_form
from antiphon.dashboard.rendering import Templates
from antiphon.dashboard.site import Site
from antiphon.record.notes import write_notes


def answer_notes(site: Site, templates: Templates) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler of `POST /notes/RUN` with the fields `tags`, between commas, and `text`. The door checks who asks."""

    async def answer(request: Request) -> Response:
        name = request.path_params["name"]
        run = site.folder.find(name)
        fields = await read_form(request)
        if not {"tags", "text"} <= fields.keys():
            raise RequestError("the fields tags and text are needed")
        try:
            await asyncio.to_thread(write_notes, run, fields["tags"].split(","), fields["text"])
        except ConfigError as error:
            raise RequestError(str(error)) from error
        return RedirectResponse(f"{templates.url('/run/', name)}#notes", 303)

    return answer
