"""The live page's server: what it answers, to whom, and what it lets a browser do."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from fixture_run import Story, eventful

from talkoot.core.errors import TalkootError
from talkoot.serve.dashboard import dashboard, serve_dashboard
from talkoot.serve.follow import Follower
from talkoot.serve.guard import host_name
from talkoot.world.real.ports import is_loopback

FAST = 0.02


@asynccontextmanager
async def browser(folder: Path, **options) -> AsyncIterator[httpx.AsyncClient]:
    app = dashboard(folder, interval=FAST, **options)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:1234") as client:
            yield client


async def until(client: httpx.AsyncClient, step: int) -> dict:
    while True:
        view = (await client.get("/api/view")).json()
        if view["progress"]["step"] >= step:
            return view
        await asyncio.sleep(0.01)


@pytest.fixture
def story(tmp_path: Path) -> Story:
    made = eventful(tmp_path, steps=24, finished=False)
    yield made
    made.log.close()


def test_every_page_answers_with_safe_headers(tmp_path: Path, story: Story):
    async def visit() -> None:
        async with browser(tmp_path) as client:
            view = await until(client, 18)
            assert view["run"]["name"] == "neighbours"
            for path in ("/", "/api/view", "/health", "/metrics", "/static/page.js", "/static/page.css"):
                answer = await client.get(path)
                assert answer.status_code == 200, path
                assert "default-src 'self'" in answer.headers["content-security-policy"]
                assert "unsafe" not in answer.headers["content-security-policy"]
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert answer.headers["referrer-policy"] == "no-referrer"
                assert "access-control-allow-origin" not in answer.headers
            assert (await client.get("/health")).json()["status"] == "ok"
            page = (await client.get("/")).text
            assert "neighbours" in page
            assert 'data-mode="live"' in page
            assert "style=" not in page

    asyncio.run(visit())


def test_nothing_can_be_changed(tmp_path: Path, story: Story):
    async def visit() -> None:
        async with browser(tmp_path) as client:
            for path in ("/", "/api/view", "/api/events", "/health", "/metrics"):
                for method in ("POST", "PUT", "PATCH", "DELETE"):
                    assert (await client.request(method, path)).status_code == 405
            for path in ("/static/../view.py", "/static/%2e%2e/view.py", "/log.sqlite"):
                assert (await client.get(path)).status_code == 404

    asyncio.run(visit())


def test_foreign_host_names_are_refused(tmp_path: Path, story: Story):
    async def visit() -> None:
        async with browser(tmp_path) as client:
            for host in ("evil.example", "127.0.0.1.evil.example", "", "localhost.evil.example:80"):
                assert (await client.get("/api/view", headers={"host": host})).status_code == 421, host
            for host in ("localhost", "localhost:99", "127.0.0.1:5", "[::1]:7", "LOCALHOST"):
                assert (await client.get("/api/view", headers={"host": host})).status_code == 200, host

    asyncio.run(visit())


def test_a_token_is_asked_for_everywhere(tmp_path: Path, story: Story):
    async def visit() -> None:
        async with browser(tmp_path, token="sesame", hosts=None) as client:
            for path in ("/", "/api/view", "/api/events", "/health", "/metrics", "/static/page.js"):
                assert (await client.get(path)).status_code == 401
                assert (await client.get(path, params={"token": "sesam"})).status_code == 401
                assert (await client.get(path, headers={"authorization": "Bearer no"})).status_code == 401
            assert (await client.get("/metrics?token=sesame")).status_code == 200
            bearer = {"authorization": "Bearer sesame", "host": "anything.example"}
            assert (await client.get("/api/view", headers=bearer)).status_code == 200
            welcome = await client.get("/?token=sesame")
            assert (welcome.status_code, welcome.headers["location"]) == (303, "/")
            cookie = welcome.headers["set-cookie"]
            assert "sesame" not in cookie
            assert "HttpOnly" in cookie
            assert "samesite=strict" in cookie.lower()
            assert (await client.get("/")).status_code == 200  # the client kept the cookie

    asyncio.run(visit())


def test_metrics_are_in_prometheus_form(tmp_path: Path, story: Story):
    async def visit() -> None:
        async with browser(tmp_path) as client:
            await until(client, 18)
            answer = await client.get("/metrics")
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            lines = [line.split(" ") for line in answer.text.splitlines() if not line.startswith("#")]
            values = {name: float(value) for name, value in lines}
            assert values["talkoot_step"] == 18
            assert values["talkoot_peers_present"] == 6
            assert values["talkoot_peers_lost_total"] == 3
            assert values["talkoot_receipts_total"] == len(story.log)
            assert values['talkoot_run{world="simulated"}'] == 1

    asyncio.run(visit())


async def follow(folder: Path, act: Callable[[Follower], Awaitable[None]]) -> Follower:
    follower = Follower(folder, FAST)
    task = asyncio.create_task(follower.run())
    try:
        await act(follower)
    finally:
        await follower.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return follower


async def picture_of(follower: Follower, step: int):
    seen = None
    while seen is None or seen.view["progress"]["step"] < step:
        seen = await follower.after(seen, 10) or seen
    return seen


def test_news_is_only_what_changed(tmp_path: Path, story: Story):
    async def act(follower: Follower) -> None:
        first = await picture_of(follower, 18)
        story.commit()
        second = await picture_of(follower, 19)
        whole, part = second.news(None), second.news(first)
        assert set(whole["fragments"]) > set(part["fragments"])
        assert {"tiles", "progress", "timeline"} <= set(part["fragments"])
        assert "recipe" not in part["fragments"]
        assert part["data"]["curve"]["step"][-1] == 19
        assert second.news(second)["fragments"] == {}
        assert "data" not in second.news(second)
        json.dumps(whole, allow_nan=False)

    asyncio.run(follow(tmp_path, act))


def test_a_log_may_come_late_and_may_be_replaced(tmp_path: Path):
    async def act(follower: Follower) -> None:
        assert follower.picture.view["session"]["status"] == "waiting"
        eventful(tmp_path, steps=12).log.close()
        await picture_of(follower, 12)
        for path in tmp_path.iterdir():
            path.unlink()
        other = eventful(tmp_path, steps=20)
        other.log.close()
        await picture_of(follower, 20)
        assert follower.picture.view["receipts"]["head"] == other.state.chain

    asyncio.run(follow(tmp_path, act))


def test_a_damaged_log_is_announced_and_the_page_stays_up(tmp_path: Path):
    eventful(tmp_path, steps=12).log.close()
    with sqlite3.connect(tmp_path / "log.sqlite") as database:
        database.execute("UPDATE receipts SET signature = zeroblob(64) WHERE position = 20")
    database.close()

    async def visit() -> None:
        async with browser(tmp_path) as client:
            while not (view := (await client.get("/api/view")).json())["problem"]:
                await asyncio.sleep(0.01)
            assert "does not verify" in view["problem"]
            assert view["receipts"]["count"] == 19
            assert (await client.get("/health")).status_code == 503
            assert "does not verify" in (await client.get("/")).text

    asyncio.run(visit())


def test_a_stream_waits_quietly_and_ends_when_the_server_closes(tmp_path: Path, story: Story):
    async def act(follower: Follower) -> None:
        seen = await picture_of(follower, 18)
        assert await follower.after(seen, 0.05) is None  # nothing new: nothing is sent
        waiting = asyncio.create_task(follower.after(seen, 60))
        await asyncio.sleep(0)
        await follower.close()
        assert await asyncio.wait_for(waiting, 5) is None

    asyncio.run(follow(tmp_path, act))


def test_a_port_that_is_taken_is_named(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        with pytest.raises(TalkootError, match="already in use"):
            serve_dashboard(tmp_path, port=holder.getsockname()[1])


def test_others_may_look_only_with_a_token(tmp_path: Path):
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(TalkootError, match="needs a token"):
            serve_dashboard(tmp_path, host=host)
    with pytest.raises(TalkootError, match="needs a token"):
        dashboard(tmp_path, hosts=None)


def test_a_folder_or_address_that_does_not_exist_is_refused(tmp_path: Path):
    with pytest.raises(TalkootError, match="no such run"):
        serve_dashboard(tmp_path / "typo")
    with pytest.raises(TalkootError, match="cannot be served there"):
        serve_dashboard(tmp_path, host="192.0.2.1", token="x")


def test_names_in_host_headers():
    assert host_name("[::1]:80") == "::1"
    assert host_name("Localhost:80") == "localhost"
    assert is_loopback("127.8.8.8")
    assert is_loopback("::1")
    assert not is_loopback("10.0.0.1")
