"""The web application: pages, the same as JSON, charts as SVG and CSV, and the stream of changes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from antiphon.core.errors import AntiphonError
from antiphon.dashboard.chat_form import answer_chat
from antiphon.dashboard.errors import RequestError
from antiphon.dashboard.export import chart_csv, chart_svg
from antiphon.dashboard.live import Changes
from antiphon.dashboard.notes_form import answer_notes
from antiphon.dashboard.pages import PAGES, Page
from antiphon.dashboard.params import Params
from antiphon.dashboard.rendering import HERE, Templates
from antiphon.dashboard.security import Door
from antiphon.dashboard.site import Site
from antiphon.record.run_dir import replace_nonfinite

UNREADABLE = 422  # status of a run that is damaged


class JsonResponse(Response):
    """JSON in ASCII, so that no text of a run can be anything but JSON; numbers that are not finite are null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return json.dumps(replace_nonfinite(content), allow_nan=False).encode("ascii")


def create_app(site: Site, token: str, prefix: str = "", version: str = "", changes: Changes | None = None) -> Door:
    """Make the application of a site.

    Args:
        site: The runs that it shows.
        token: Token that requests must carry; empty if everybody may read.
        prefix: Path at which a proxy shows it.
        version: Version of Antiphon, shown on every page.
        changes: The streams of changes, for a server that closes them before it ends.
    """
    templates = Templates(prefix, version)
    changes = changes or Changes(site)
    routes = [Route("/", lambda request: RedirectResponse(templates.url("/runs"), 307))]
    for page in PAGES:
        path = page.path + ("{name:path}" if page.path.endswith("/") else "")
        routes.append(Route(f"/api{path}", _answer_json(site, page)))
        if page.template:
            routes.append(Route(path, _answer_page(site, page, templates)))
        else:
            routes.append(Route(path.replace("/", "/svg/", 1), _answer_chart(site, page, chart_svg, "image/svg+xml")))
            routes.append(Route(path.replace("/", "/csv/", 1), _answer_chart(site, page, chart_csv, "text/csv")))
    routes.append(Route("/api/schema", lambda request: JsonResponse(describe_api())))
    routes.append(Route("/notes/{name:path}", answer_notes(site, templates), methods=["POST"]))
    routes.append(Route("/chat/{name:path}", answer_chat(site, templates), methods=["POST"]))
    routes.append(Route("/live/{name:path}", _answer_changes(changes)))
    app = Starlette(
        routes=[*routes, Mount("/static", StaticFiles(directory=HERE / "static"))],
        lifespan=_make_lifespan(site),
        exception_handlers={
            AntiphonError: _make_error_handler(site, templates),
            HTTPException: _make_error_handler(site, templates),
        },
    )
    return Door(app, token, prefix)


def describe_api() -> dict[str, Any]:
    """Return the JSON schema of each answer of `/api`, by path, with the parameters in its description."""
    return {
        f"/api{page.path}{'{run}' if page.path.endswith('/') else ''}": {
            "description": page.query.__doc__,
            "schema": TypeAdapter(page.result).json_schema(),
        }
        for page in PAGES
    }


def _make_lifespan(site: Site) -> Any:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        site.index.start()
        yield
        await asyncio.to_thread(site.index.close)

    return lifespan


def _read_params(request: Request) -> Params:
    return Params(request.query_params.multi_items(), request.path_params.get("name", ""))


# Queries read files: as plain functions they run in threads, and do not hold up other requests.
def _answer_page(site: Site, page: Page, templates: Templates) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        params = _read_params(request)
        context = {"page": page.query(site, params), "here": page.path}
        return _html(templates.render(page.template, params, context))

    return answer


def _answer_json(site: Site, page: Page) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        return JsonResponse(asdict(page.query(site, _read_params(request))))

    return answer


def _answer_chart(site: Site, page: Page, make: Callable[[Any], str], media: str) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        text = make(page.query(site, _read_params(request)))
        return Response(text.encode("utf-8", "replace"), media_type=media)

    return answer


def _answer_changes(changes: Changes) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        stream = changes.watch(request.path_params["name"])
        return StreamingResponse(stream, media_type="text/event-stream")

    return answer


def _make_error_handler(site: Site, templates: Templates) -> Any:
    def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            status, message = error.status_code, "There is no such page." if error.status_code == 404 else error.detail
        else:
            status = error.status if isinstance(error, RequestError) else UNREADABLE
            message = str(error)[:2000]
        if request.url.path.startswith("/api/"):
            return JsonResponse({"error": message}, status)
        soon = status == 404 and request.url.path.startswith("/now/")  # a run that is about to begin
        name = request.path_params.get("name", "")
        run = name if name in site.folder.list_runs() else ""
        context = {"status": status, "message": message, "here": "", "retry": soon, "run": run}
        text = templates.render("error.html", Params([]), context)
        return _html(text, status)

    return answer


def _html(text: str, status: int = 200) -> HTMLResponse:
    return HTMLResponse(text.encode("utf-8", "replace"), status)
