"""What stands before every page: who may ask, under which name, and what a browser may do with the answer."""

from __future__ import annotations

import hashlib
import hmac
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse
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


class Guard:
    """Wraps an application: checks the Host header and the token, adds security headers.

    Args:
        app: what is guarded.
        hosts: names under which this server may be addressed; ``None`` = any, for servers with a token. The
            check keeps a page elsewhere from reading this one by pointing its own name here (DNS rebinding).
        token: what every request must present as ``?token=``, bearer header or cookie; ``None`` = open.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None, token: str | None) -> None:
        self._app, self._hosts, self._token = app, hosts, token
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
            return PlainTextResponse("This server does not answer to that host name.\n", status_code=421)
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
        text = "This page needs a token: open the address that `talkoot watch` printed.\n"
        return PlainTextResponse(text, status_code=401, headers={"www-authenticate": "Bearer"})

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
