"""One request to a language model behind the OpenAI protocol (``POST /chat/completions``), with the standard library.

What a server sends is a stranger's: bounded in bytes and time. Redirects are not followed, because the key goes along.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence

import msgspec

from talkoot.core.errors import Exit, TalkootError

_MAX_BYTES, _CHUNK = 1 << 22, 1 << 16


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Follow nothing."""


def chat(
    base_url: str,
    model: str,
    messages: Sequence[Mapping[str, str]],
    key: str = "",
    timeout_s: float = 60.0,
    max_tokens: int = 1024,
    *,
    allow_plain: bool = False,
) -> str:
    """The model's answer to a conversation.

    Args:
        base_url: up to and including ``/v1``: https anywhere, http on this machine only.
        messages: with ``role`` and ``content`` each.
        key: sent as a bearer token; empty = none.
        timeout_s: for the whole request.
        allow_plain: let text and key travel unencrypted to other machines.

    Raises:
        TalkootError: the address is not allowed, nobody answers, in time, or what comes is no whole answer.
    """
    url = _checked(base_url, allow_plain)
    body = {"model": model, "messages": [dict(one) for one in messages], "max_tokens": max_tokens, "temperature": 0}
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")
    # No proxy from the environment: the address named is the one that is asked.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
    try:
        data = _fetch(opener, request, timeout_s)
    except urllib.error.HTTPError as error:
        raise _refused_by(url, error) from error
    except (TimeoutError, urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise _unreached(url, error, timeout_s) from error
    return _content(data, url, max_tokens)


def _checked(base_url: str, allow_plain: bool) -> str:
    try:
        parts = urllib.parse.urlsplit(base_url)
        host = parts.hostname or ""
        _ = parts.port
    except ValueError as error:
        raise _bad_address(base_url, str(error)) from error
    if parts.scheme not in ("http", "https") or not host or parts.username is not None:
        raise _bad_address(base_url, "it must be http:// or https://, a host and a path, without a password")
    if parts.scheme == "http" and not allow_plain and not _loopback(host):
        raise _bad_address(base_url, "text and key would travel unencrypted to another machine")
    return base_url.rstrip("/") + "/chat/completions"


def _loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _fetch(opener: urllib.request.OpenerDirector, request: urllib.request.Request, timeout_s: float) -> bytes:
    deadline, data = time.monotonic() + timeout_s, bytearray()
    with opener.open(request, timeout=timeout_s) as response:
        # read1 returns what is there, so that a server that drips cannot stretch the time.
        while part := response.read1(_CHUNK):
            data += part
            if len(data) > _MAX_BYTES:
                raise http.client.HTTPException(f"more than {_MAX_BYTES} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError
        if response.length:
            raise http.client.IncompleteRead(bytes(data), response.length)
    return bytes(data)


def _content(data: bytes, url: str, max_tokens: int) -> str:
    try:
        answer = msgspec.json.decode(data, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _error("the server's answer is no chat completion", url, str(error), "check base_url") from error
    choice = answer.choices[0] if answer.choices else None
    if choice is not None and choice.finish_reason == "length":
        why = f"it was not finished after {max_tokens} tokens"
        raise _error("the model's answer was cut off", url, why, "raise max_tokens")
    if choice is None or not choice.message.content:
        raise _error("the model's answer is empty", url, "no text came", "try another model or prompt")
    return choice.message.content


def _refused_by(url: str, error: urllib.error.HTTPError) -> TalkootError:
    try:
        said = error.read(300).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException):
        said = ""
    advice = {401: "check the key", 403: "check the key", 404: "check base_url and the model", 429: "ask less often"}
    next = advice.get(error.code, "see the server's log")
    return _error("the server refused the request", url, f"status {error.code} {error.reason}: {said}", next)


def _unreached(url: str, error: Exception, timeout_s: float) -> TalkootError:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, TimeoutError):
        return _error(
            "the server did not answer in time", url, f"{timeout_s:g} s passed", "raise timeout_s", reach=True
        )
    if isinstance(reason, ConnectionRefusedError):
        return _error("nobody listens at this address", url, "the connection was refused", "start it", reach=True)
    if isinstance(reason, http.client.IncompleteRead):
        return _error("the server's answer was truncated", url, "the connection broke", "try again", reach=True)
    return _error("the server cannot be used", url, str(reason)[:200], "check base_url", reach=True)


def _bad_address(base_url: str, why: str) -> TalkootError:
    return _error("this address is not asked", base_url, why, "use https, or a server on 127.0.0.1")


def _error(what: str, where: str, why: str, next: str, *, reach: bool = False) -> TalkootError:
    return TalkootError(what, where=where, why=why, next=next, code=Exit.UNREACHABLE if reach else Exit.BAD_INPUT)
