"""What stands before every page: who may ask, under which name, and what a browser may do with the answer."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "img-src 'self' data:"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


def _as_text(text: str, status: int) -> Response:
    return PlainTextResponse(f"{text}\n", status_code=status)


class Guard:
    """Wraps an application: checks the Host header and the token, adds security headers.

    Args:
        app: what is guarded.
        hosts: names under which this server may be addressed; ``None`` = any, for servers with a token. The
            check keeps a page elsewhere from reading this one by pointing its own name here (DNS rebinding).
        token: what every request must present as ``?token=``, bearer header or cookie; ``None`` = open.
        refusal: makes the answer to whoever is not let in, of a sentence and a status.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: frozenset[str] | None,
        token: str | None,
        refusal: Callable[[str, int], Response] = _as_text,
    ) -> None:
        self._app, self._hosts, self._token, self._refuse = app, hosts, token, refusal
        self._proof = _proof(token) if token is not None else ""
        self._cookie = f"talkoot-{self._proof[:8]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        answer = self._refusal(scope) or self._app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        headers = Headers(scope=scope)
        if self._hosts is not None and host_name(headers.get("host", "")) not in self._hosts:
            return self._refuse("This server does not answer to that host name.", 421)
        if self._token is None:
            return None
        query = parse_qs(scope["query_string"].decode("latin-1"))
        offered = query.get("token", [""])[0]
        if offered and hmac.compare_digest(_proof(offered), self._proof):
            return self._welcome() if scope["path"] == "/" else None
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(_proof(bearer.strip()), self._proof):
            return None
        cookie = cookie_parser(headers.get("cookie", "")).get(self._cookie, "")
        if hmac.compare_digest(cookie.encode(), self._proof.encode()):
            return None
        answer = self._refuse("This server needs a token: the one it was started with (`--token`).", 401)
        answer.headers["www-authenticate"] = "Bearer"
        return answer

    def _welcome(self) -> ASGIApp:
        """To the page itself, with a cookie: an address with a secret in it gets copied around."""
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(self._cookie, self._proof, httponly=True, samesite="strict", path="/")
        return answer


def _proof(token: str) -> str:
    """What stands for a token in a cookie: from it nobody learns the token."""
    return hashlib.blake2b(token.encode(), digest_size=32, person=b"watch-token").hexdigest()


def host_name(header: str) -> str:
    """The name in a Host header, without port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower().rstrip(".")
