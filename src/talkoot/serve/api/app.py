"""The server's application: OpenAI's endpoints, and those that change or describe what is served."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route as Path
from starlette.types import ASGIApp

from talkoot.core.errors import Exit, TalkootError
from talkoot.serve.api.accounts import Accounts
from talkoot.serve.api.answers import Reply, error
from talkoot.serve.api.catalogue import Catalogue, Shelf
from talkoot.serve.api.routing import Dispatcher, NoSuchModel, Route, UnknownDomain
from talkoot.serve.api.schema import MAX_BODY_BYTES, AddExpert, BadRequest, ChatRequest, CompletionRequest, parse
from talkoot.serve.api.service import Busy, Part, Service, TooLong, Unavailable, Unfit
from talkoot.serve.api.stream import EventStream, HungUp, Stopping, unless_gone
from talkoot.serve.exposition import MEDIA_TYPE
from talkoot.serve.guard import LOOPBACK, Guard
from talkoot.world.real.ports import is_loopback

RETRY_AFTER_S = 2
DONE = "[DONE]"
STOPPING = error("the server stops", "server_error", None, "stopping")
HUNG_UP = 499  # never seen by anybody: what the log calls a request whose client left


class Api:
    """What all endpoints share.

    Args:
        catalogue: what is on offer.
        dispatcher: who answers.
        service: gives the answers.
    """

    def __init__(self, catalogue: Catalogue, dispatcher: Dispatcher, service: Service) -> None:
        self.catalogue, self.dispatcher, self.service = catalogue, dispatcher, service
        self.accounts = Accounts()
        self.stopping = asyncio.Event()  # once set, answers under way end
        self._changing = asyncio.Lock()

    async def shelf(self) -> Shelf:
        """What is served now; the folder is looked at, and read again, beside the requests, where it changed."""
        if self.catalogue.stale:
            async with self._changing:
                if await asyncio.to_thread(self.catalogue.refresh):
                    self._changed()
        return self.catalogue.shelf

    def _changed(self) -> None:
        sources = list(self.catalogue.shelf.models.values())
        self.service.pool.retire(set(sources))
        self.service.voices.keep(sources)

    async def change(self, work: Callable[[], Shelf]) -> Shelf:
        """Change the blend, one change at a time, beside the requests."""
        async with self._changing:
            try:
                return await asyncio.to_thread(work)
            finally:
                self._changed()

    # -- answering -------------------------------------------------------------------------------------------

    async def complete(self, request: Request, kind: type[ChatRequest] | type[CompletionRequest]) -> ASGIApp:
        """Both kinds of completion."""
        started = time.monotonic()
        wish = parse(await _body(request), kind)
        job, chat, shelf = wish.job(), kind is ChatRequest, await self.shelf()
        request.state.model = wish.model if wish.model in shelf.names else ""
        route = self.dispatcher.route(shelf, wish.model, job.prompt, wish.user or "")
        reply = Reply(chat=chat, model=wish.model, route=route, logprobs=job.logprobs)
        parts = self.service.answer(job, route)
        async with AsyncExitStack() as held:
            held.push_async_callback(parts.aclose)
            first = await unless_gone(request.receive, anext(parts), self.stopping)
            reply.take(first)
            if job.streamed:
                held.pop_all()
                events = self._events(reply, first, parts, started, usage=wish.include_usage)
                return EventStream(events, _headers(reply, route), self.stopping, [_json(STOPPING), DONE])
            await unless_gone(request.receive, _drain(reply, parts), self.stopping)
        self._count(reply, started)
        return JSONResponse(reply.whole(), headers=_headers(reply, route))

    async def _events(
        self, reply: Reply, first: Part, parts: AsyncGenerator[Part], started: float, *, usage: bool
    ) -> AsyncGenerator[str]:
        try:
            yield _json(reply.chunk(first))
            async for part in parts:
                reply.take(part)
                yield _json(reply.chunk(part))
            if usage:
                yield _json(reply.counted())
            self._count(reply, started)
        except (TalkootError, BadRequest) as problem:  # the status is sent: what went wrong is told in the stream
            yield _json(_refusal(problem)[1])
        finally:
            await parts.aclose()
        yield DONE

    def _count(self, reply: Reply, started: float) -> None:
        now = time.monotonic()
        self.accounts.answer(reply.usage, len(reply.switches), reply.first_at - started, now - started)

    # -- telling ---------------------------------------------------------------------------------------------

    async def models(self) -> dict[str, Any]:
        """``GET /v1/models``."""
        shelf = await self.shelf()
        return {"object": "list", "data": [_model(name, shelf) for name in shelf.names]}

    async def health(self) -> tuple[dict[str, Any], int]:
        """``GET /health``."""
        shelf, now = await self.shelf(), {slot.source: slot for slot in self.service.pool.slots}
        experts = {
            name: {
                "state": _state(now.get(source)),
                "healthy": self.service.pool.healthy(source),
                "process": getattr(getattr(now.get(source), "backend", None), "process", 0),
                "token_ms": round(1000 * now[source].token_s, 2) if source in now else None,
            }
            for name, source in shelf.models.items()
        }
        bad = bool(self.catalogue.problem) or not shelf.models
        told = {
            "status": "problem" if bad else "ok",
            "router": shelf.version or None,
            "waiting": self.service.gate.queued,
            "models": experts,
            "problems": {**shelf.problems, **({"folder": self.catalogue.problem} if self.catalogue.problem else {})},
        }
        return told, 503 if bad else 200


def application(
    lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]],
    *,
    token: str | None = None,
    hosts: frozenset[str] | None = LOOPBACK,
) -> Starlette:
    """The application.

    Args:
        lifespan: what runs beside it; it puts an :class:`Api` into the application's state, as ``api``.
        token: required with every request when given.
        hosts: names in the Host header that are answered; ``None`` = any, only with a token.
    """
    routes = [
        Path("/v1/models", _models),
        Path("/v1/models/{name}", _one_model),
        Path("/v1/chat/completions", _chat, methods=["POST"]),
        Path("/v1/completions", _complete, methods=["POST"]),
        Path("/v1/experts", _add, methods=["POST"]),
        Path("/v1/experts/{name}", _remove, methods=["DELETE"]),
        Path("/health", _health),
        Path("/metrics", _metrics),
    ]
    handlers: dict[Any, Any] = dict.fromkeys((TalkootError, BadRequest, HungUp, Stopping, ClientDisconnect), _told)
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, hosts=hosts, token=token, refusal=_not_let_in)],
        exception_handlers=handlers | {HTTPException: _told_by_starlette, Exception: _bug},
        lifespan=lifespan,
    )
    app.state.guarded = token is not None
    return app


def _api(request: Request) -> Api:
    return request.app.state.api


async def _models(request: Request) -> Response:
    return JSONResponse(await _api(request).models())


async def _one_model(request: Request) -> Response:
    shelf, name = await _api(request).shelf(), request.path_params["name"]
    if name not in shelf.names:
        raise NoSuchModel(f"the model {name!r} is not served", where="model", why="", next="see GET /v1/models")
    return JSONResponse(_model(name, shelf))


async def _chat(request: Request) -> ASGIApp:
    answer = await _api(request).complete(request, ChatRequest)
    _count(request, 200)
    return answer


async def _complete(request: Request) -> ASGIApp:
    answer = await _api(request).complete(request, CompletionRequest)
    _count(request, 200)
    return answer


def _count(request: Request, status: int) -> None:
    # A client's words become labels only where they name something served: there must not be endlessly many.
    _api(request).accounts.requests[request.url.path, getattr(request.state, "model", ""), status] += 1


def _check_near(request: Request) -> None:
    """Without a token, only this machine may change what is served, whoever else a proxy lets through."""
    near = request.client is not None and is_loopback(request.client.host)
    if not near and not request.app.state.guarded:
        raise HTTPException(403, "experts can be changed from this machine only, or with a token (`--token`)")


async def _add(request: Request) -> Response:
    _check_near(request)
    api, wish = _api(request), parse(await _body(request), AddExpert)
    shelf = await api.change(lambda: api.catalogue.add(wish.name, wish.model, wish.statistics))
    return JSONResponse(_model(wish.name, shelf) | {"router": shelf.version or None}, status_code=201)


async def _remove(request: Request) -> Response:
    _check_near(request)
    api, name = _api(request), request.path_params["name"]
    if name not in (await api.shelf()).experts:
        raise NoSuchModel(f"there is no expert {name!r}", where="model", why="", next="see GET /v1/models")
    shelf = await api.change(lambda: api.catalogue.remove(name))
    return JSONResponse({"id": name, "object": "model", "deleted": True, "router": shelf.version or None})


async def _health(request: Request) -> Response:
    told, status = await _api(request).health()
    return JSONResponse(told, status_code=status)


async def _metrics(request: Request) -> Response:
    api = _api(request)
    text = api.accounts.text(await api.shelf(), api.service.pool, api.service.gate.queued)
    return PlainTextResponse(text, media_type=MEDIA_TYPE)


def _model(name: str, shelf: Shelf) -> dict[str, Any]:
    source = shelf.models.get(name)
    said = {"kind": source.kind, "bytes": source.weights, "positions": source.positions} if source else {"kind": "auto"}
    return {"id": name, "object": "model", "created": 0, "owned_by": "talkoot", "talkoot": said}


def _state(slot: Any) -> str:
    if slot is None or (slot.backend is None and slot.starting is None):
        return "on disk"
    return "loading" if slot.backend is None else "loaded"


def _headers(reply: Reply, route: Route) -> dict[str, str]:
    return {"x-talkoot-expert": reply.expert, "x-talkoot-mode": route.mode, "x-talkoot-router": route.version or "none"}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


async def _drain(reply: Reply, parts: AsyncGenerator[Part]) -> None:
    async for part in parts:
        reply.take(part)


async def _body(request: Request) -> bytes:
    """The body, bounded; only JSON, which a page elsewhere cannot make a browser send here unasked."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "the body must be JSON, with the header content-type: application/json")
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


# -- errors --------------------------------------------------------------------------------------------------

_STATUS: tuple[tuple[type[TalkootError], int, str, str | None, str | None], ...] = (
    (NoSuchModel, 404, "invalid_request_error", "model", "model_not_found"),
    (UnknownDomain, 422, "invalid_request_error", "messages", "unknown_domain"),
    (TooLong, 400, "invalid_request_error", "messages", "context_length_exceeded"),
    (Unfit, 400, "invalid_request_error", "messages", "unfit_prompt"),
    (Busy, 429, "rate_limit_error", None, "queue_full"),
    (Unavailable, 503, "server_error", None, "no_model_available"),
)


def _refusal(problem: Exception) -> tuple[int, dict[str, Any]]:
    if isinstance(problem, BadRequest):
        return 400, error(problem.text, "invalid_request_error", problem.param, "invalid_value")
    if isinstance(problem, Stopping):
        return 503, STOPPING
    if not isinstance(problem, TalkootError):
        return HUNG_UP, error("the client hung up", "client_error")
    text = f"{problem.what} ({problem.where})" + (f": {problem.why}" if problem.why else "") + f". {problem.next}."
    for kind, status, name, param, code in _STATUS:
        if isinstance(problem, kind):
            return status, error(text, name, param, code)
    ours = problem.code == Exit.UNREACHABLE
    return (503, error(text, "server_error")) if ours else (400, error(text, "invalid_request_error"))


async def _told(request: Request, problem: Exception) -> Response:
    status, body = _refusal(problem)
    if request.url.path.endswith("/completions"):
        _count(request, status)
    headers = {"retry-after": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    return JSONResponse(body, status_code=status, headers=headers)


async def _told_by_starlette(request: Request, problem: HTTPException) -> Response:
    text = f"{request.method} {request.url.path}: {problem.detail}"
    return JSONResponse(error(text, "invalid_request_error"), problem.status_code, headers=problem.headers)


async def _bug(request: Request, problem: Exception) -> Response:
    """The traceback goes to the server's own output, not to strangers."""
    return JSONResponse(error("the server has a bug; its output says more", "server_error"), status_code=500)


def _not_let_in(text: str, status: int) -> Response:
    kind = "authentication_error" if status == 401 else "invalid_request_error"
    code = "invalid_api_key" if status == 401 else None
    return JSONResponse(error(text, kind, None, code), status_code=status)
