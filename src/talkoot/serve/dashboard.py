"""The live page of a run. It only reads: there is nothing here that changes a run."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from talkoot.core.errors import TalkootError
from talkoot.serve.exposition import MEDIA_TYPE, Metric, exposition
from talkoot.serve.follow import Follower, Picture
from talkoot.serve.guard import LOOPBACK, Guard
from talkoot.serve.markup import Markup
from talkoot.serve.render import STATIC, page
from talkoot.serve.web import Server, address_of, bind, check_open, hosts_for, open_to_all

PATIENCE = 15.0  # seconds of silence after which a stream says that it is still there
OPEN = "without one, anybody who reaches this machine could read the run"
NOTE = "This page follows the run's log and changes nothing. It is up to date within about a second."
HEAD = Markup(
    '<link rel="icon" type="image/svg+xml" href="/static/icon.svg">'
    '<link rel="stylesheet" href="/static/uPlot.min.css"><link rel="stylesheet" href="/static/page.css">'
)
FOOT = Markup(
    '<script src="/static/uPlot.iife.min.js" defer></script><script type="module" src="/static/page.js"></script>'
)


def dashboard(
    run_folder: Path,
    *,
    token: str | None = None,
    hosts: frozenset[str] | None = LOOPBACK,
    interval: float = 1.0,
) -> Starlette:
    """The application.

    Args:
        run_folder: the run's folder; its log may come later.
        token: required with every request when given.
        hosts: names in the Host header that are answered; ``None`` = any, only with a token.
        interval: seconds between looks at the log.

    Raises:
        TalkootError: any host is to be answered, but no token is required.
    """
    if hosts is None and token is None:
        raise open_to_all("any host name", OPEN)
    follower = Follower(run_folder, interval)

    @contextlib.asynccontextmanager
    async def following(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(follower.run())
        try:
            yield
        finally:
            await follower.close()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    routes = [
        Route("/", _page),
        Route("/api/view", _view),
        Route("/api/events", _events),
        Route("/health", _health),
        Route("/metrics", _metrics),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    guard = Middleware(Guard, hosts=hosts, token=token)
    app = Starlette(routes=routes, middleware=[guard], lifespan=following)
    app.state.follower = follower
    return app


def _picture(request: Request) -> Picture:
    return request.app.state.follower.picture


async def _page(request: Request) -> HTMLResponse:
    return HTMLResponse(page(_picture(request).view, head=HEAD, foot=FOOT, live=True, note=NOTE))


async def _view(request: Request) -> JSONResponse:
    return JSONResponse(_picture(request).view)


async def _health(request: Request) -> JSONResponse:
    view = _picture(request).view
    state = {"status": "problem" if view["problem"] else "ok", "run": view["session"]["status"]}
    return JSONResponse(state | {"receipts": view["receipts"]["count"]}, status_code=503 if view["problem"] else 200)


async def _metrics(request: Request) -> PlainTextResponse:
    return PlainTextResponse(metrics(_picture(request).view), media_type=MEDIA_TYPE)


async def _events(request: Request) -> StreamingResponse:
    return StreamingResponse(_stream(request.app.state.follower), media_type="text/event-stream")


async def _stream(follower: Follower) -> AsyncIterator[str]:
    """Pictures as they come, each as its difference from the one sent before; a slow client skips some."""
    sent: Picture | None = None
    yield "retry: 2000\n\n"
    while not follower.closing:
        picture = await follower.after(sent, PATIENCE)
        if picture is None:
            yield ": still here\n\n"
            continue
        text = json.dumps(picture.news(sent), allow_nan=False, separators=(",", ":"))
        yield f"id: {picture.number}\nevent: update\ndata: {text}\n\n"
        sent = picture


def metrics(view: dict[str, Any]) -> str:
    """The headline numbers in Prometheus' text format."""
    done, peers = view["progress"], view["peers"]
    rows = [
        ("step", "gauge", "Committed steps (in post-training, rounds) that stand.", done["step"]),
        ("loss", "gauge", "Training loss of the last step, nats per token.", done["loss"]),
        ("held_out_loss", "gauge", "Latest held-out loss, nats per token.", done["held_out"]),
        (
            "tokens",
            "gauge",
            "Tokens trained on (in post-training, generated), rolled-back steps excluded.",
            done["tokens"],
        ),
        ("tokens_per_second", "gauge", "Speed over the latest steps.", done["tokens_per_s"]),
        ("peers_present", "gauge", "Peers that are there now.", peers["present"]),
        ("peers_lost_total", "counter", "Peers ever lost.", peers["lost"]),
        ("rollbacks_total", "counter", "Times the run went back.", done["rollbacks"]),
        ("receipts_total", "counter", "Receipts read and checked.", view["receipts"]["count"]),
    ]
    if told := view["tune"]:
        rows += [
            ("reward", "gauge", "Mean reward of the peers' newest rounds.", told["reward"]["mean"]),
            ("held_out_accuracy", "gauge", "Mean held-out greedy accuracy of the peers.", told["greedy"]["mean"]),
            ("rounds_alone", "gauge", "Rounds in which a peer learned from itself only.", told["alone"]["rounds"]),
            ("refused_total", "counter", "Records and completions of others not used.", told["refused"]),
        ]
    world = view["run"].get("world", "unknown")
    run = Metric("run", "gauge", "The run.", {(("world", str(world)),): 1})
    return exposition([*(Metric(*row) for row in rows), run])


def serve_dashboard(
    run_folder: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    ready: Callable[[str], None] = lambda address: None,
    *,
    token: str | None = None,
) -> None:
    """Serve the live page until interrupted.

    Args:
        run_folder: the run's folder; its log may come later.
        host: the address to listen on.
        port: 0 lets the system choose.
        ready: called with the page's address (with its token, if any) once connections are accepted.
        token: required for, and then with every request to, an address that others can reach.

    Raises:
        TalkootError: no such folder, the port is taken, or the address is open to others without a token.
    """
    check_open(host, token, OPEN)
    if not run_folder.is_dir():
        raise TalkootError(
            "there is no such run",
            where=str(run_folder),
            why="the folder does not exist",
            next="name a run's folder: train, tune, blend train and demo make them below runs/",
        )
    listener = bind(host, port)
    app = dashboard(run_folder, token=token or None, hosts=hosts_for(host))
    ready(f"{address_of(host, listener)}/" + (f"?token={token}" if token else ""))
    Server(app, app.state.follower.close).run_on(listener)
