"""Handler of the chat page's forms: it sends a prompt or message to the model server and renders the page with the answer."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from antiphon.dashboard.errors import RequestError
from antiphon.dashboard.forms import read_form
from antiphon.dashboard.model_server import ModelServer, ModelServerError
from antiphon.dashboard.params import Params
from antiphon.dashboard.rendering import Templates
from antiphon.dashboard.site import Site
from antiphon.dashboard.views.chat import ChatPage, query_chat

MOST_SAMPLES = 16
MOST_TOKENS = 32_768  # of an answer
MOST_TURNS = 64
ROLES = ("user", "assistant")


def answer_chat(site: Site, templates: Templates) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler of `POST /chat/RUN`. The door checks who asks.

    Fields: `id` names the attempt whose prompt is asked; with `message` it is added to the conversation `turns`, a list of role
    and text in JSON, and that is sent instead. `temperature`, `max_tokens` and `samples` say how to sample.
    """

    async def answer(request: Request) -> Response:
        name = request.path_params["name"]
        fields = await read_form(request)
        params = Params([("id", fields.get("id", ""))], name)
        page = _with_settings(await asyncio.to_thread(query_chat, site, params), Params([*fields.items()], name))
        if site.model_server is None:
            raise RequestError("the dashboard was started without --model-server")
        page = await _ask(site.model_server, page, fields)
        text = templates.render("chat.html", params, {"page": page, "here": "/chat/"})
        return HTMLResponse(text.encode("utf-8", "replace"))

    return answer


def _with_settings(page: ChatPage, params: Params) -> ChatPage:
    temperature = params.number("temperature", page.temperature)
    max_tokens = params.integer("max_tokens", page.max_tokens)
    samples = params.integer("samples", page.samples)
    bounds = (
        ("temperature", temperature, 0, 10),
        ("max_tokens", max_tokens, 1, MOST_TOKENS),
        ("samples", samples, 1, MOST_SAMPLES),
    )
    for key, value, low, high in bounds:
        if value is None or not low <= value <= high:
            raise RequestError(f"{key}: {value} is not valid; valid are {low} to {high}")
    assert temperature is not None and max_tokens is not None and samples is not None
    return replace(page, temperature=temperature, max_tokens=max_tokens, samples=samples)


async def _ask(server: ModelServer, page: ChatPage, fields: Mapping[str, str]) -> ChatPage:
    settings = {"temperature": page.temperature, "max_tokens": page.max_tokens}
    message = fields.get("message", "").replace("\r\n", "\n").strip()
    turns = [*_read_turns(fields.get("turns", "")), *([("user", message)] if message else [])]
    page = replace(page, turns=turns)
    try:
        if message:
            said = await server.reply([{"role": role, "content": text} for role, text in turns], settings)
            return replace(page, turns=[*turns, ("assistant", said)])
        if not page.prompt:
            raise RequestError("message: a message is needed where no attempt has a prompt")
        return replace(page, answers=await server.complete(page.prompt, page.samples, settings))
    except ModelServerError as error:
        return replace(page, problem=str(error))


def _read_turns(text: str) -> list[tuple[str, str]]:
    """Return the messages before, which the page itself has sent along."""
    try:
        turns = [(role, said) for role, said in json.loads(text or "[]")]
    except (ValueError, TypeError) as error:
        raise RequestError("turns: not a list of roles and texts") from error
    if len(turns) > MOST_TURNS or any(role not in ROLES or not isinstance(said, str) for role, said in turns):
        raise RequestError(f"turns: at most {MOST_TURNS} texts of {' and '.join(ROLES)} are valid")
    return turns
