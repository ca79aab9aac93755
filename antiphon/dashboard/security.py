"""The door of the dashboard: a token, forms from its own pages alone, safe headers, and the proxy's prefix."""

import hashlib
import hmac
import re
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from antiphon.core.errors import ConfigError

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
FORMS = ("/notes/", "/chat/")  # paths to which the dashboard's own pages send forms
LONGEST_ADDRESS = 8_192  # bytes of path and query
REFUSED = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Antiphon</title>
<meta name="viewport" content="width=device-width"><h1>This page needs the token</h1>
<p>Open the address that <code>antiphon dashboard</code> printed: it holds the token, and this browser keeps it.</p>"""


def check_prefix(prefix: str) -> str:
    """Return the path at which a proxy shows the dashboard, without a slash at its end; raise `ConfigError` if it is none."""
    found = prefix.rstrip("/")
    if found and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", found):
        raise ConfigError("must be a path such as /antiphon", key="--prefix", value=prefix)
    return found


class Door:
    """Lets requests in that carry the token, and adds the headers of every response."""

    def __init__(self, app: Any, token: str, prefix: str = "") -> None:
        """Guard an application.

        Args:
            app: The application.
            token: The token; empty if everybody may read.
            prefix: Path at which a proxy shows the dashboard.
        """
        self._app = app
        self._token = token
        self._prefix = prefix
        # Cookies are shared between ports of a host: each dashboard has one of its own name.
        self.cookie = f"antiphon_{hashlib.sha256(token.encode()).hexdigest()[:12]}"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        path = scope["path"]
        if self._prefix and (path == self._prefix or path.startswith(self._prefix + "/")):
            scope = {**scope, "path": path.removeprefix(self._prefix) or "/"}

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                have = {name.lower() for name, _ in message["headers"]}
                if b"cache-control" not in have:
                    own.append((b"cache-control", b"no-store"))
                message["headers"] = [*message["headers"], *own]
            await send(message)

        refusal = self._refuse(scope)
        await (self._app if refusal is None else refusal)(scope, receive, send_with_headers)

    def _refuse(self, scope: Any) -> Response | None:
        """Return the response to a request that does not go on to a page; None if it does."""
        query = scope["query_string"]
        is_form = scope["method"] == "POST" and scope["path"].startswith(FORMS) and bool(self._token)
        if scope["method"] not in ("GET", "HEAD") and not is_form:
            return JSONResponse({"error": "the dashboard is read-only"}, 405, {"Allow": "GET, HEAD"})
        if len(scope["path"]) + len(query) > LONGEST_ADDRESS:
            return JSONResponse({"error": "the address is too long"}, 414)
        if not self._token:
            return None
        headers = {name.lower(): value for name, value in scope["headers"]}
        given = dict(parse_qsl(query.decode("latin-1"))).get("token")
        if given is not None and self._is_token(given):
            return self._admit(scope["path"], query.decode("latin-1"))
        if self._is_token(_find_bearer(headers)):
            return None  # browsers send it for no other site
        if self._is_token(self._find_cookie(headers)):
            is_allowed = not is_form or _is_from_own_page(headers)
            return None if is_allowed else JSONResponse({"error": "the request comes from another page"}, 403)
        if scope["path"].startswith("/api/"):
            return JSONResponse({"error": "the token is missing or wrong"}, 401, {"WWW-Authenticate": "Bearer"})
        return HTMLResponse(REFUSED, 401)

    def _admit(self, path: str, query: str) -> Response:
        """Keep the token in a cookie and lead to the same page without it."""
        rest = urlencode([(key, value) for key, value in parse_qsl(query) if key != "token"])
        target = self._prefix + quote("/" + path.lstrip("/\\")) + (f"?{rest}" if rest else "")
        response = RedirectResponse(target, 303)
        response.set_cookie(self.cookie, self._token, httponly=True, samesite="lax", path=self._prefix or "/")
        return response

    def _find_cookie(self, headers: dict[bytes, bytes]) -> str:
        cookies: SimpleCookie = SimpleCookie()
        try:
            cookies.load(headers.get(b"cookie", b"").decode("latin-1"))
        except CookieError:
            return ""
        found = cookies.get(self.cookie)
        return found.value if found else ""

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode())


def _find_bearer(headers: dict[bytes, bytes]) -> str:
    kind, _, value = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return value.strip() if kind.lower() == "bearer" else ""


def _is_from_own_page(headers: dict[bytes, bytes]) -> bool:
    """Return True if a browser says that a request comes from a page of this server: same host, same port."""
    site = headers.get(b"sec-fetch-site")
    if site is not None:  # no script can set it; behind a proxy it knows more than the names do
        return site == b"same-origin"
    origin = urlsplit(headers.get(b"origin", b"").decode("latin-1")).netloc
    return bool(origin) and origin == headers.get(b"host", b"").decode("latin-1")
