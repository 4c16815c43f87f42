"""The client of the OpenAI protocol against a real server on this machine."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from talkoot.core.errors import Exit, TalkootError
from talkoot.tune.openai_client import chat

TURN = [{"role": "user", "content": "hello"}]


def said(text, reason="stop"):
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}]})


@pytest.fixture
def server():
    """Answers every request with ``state['reply']`` = (status, headers, body), and keeps what was asked."""
    state = {"asked": [], "reply": (200, {}, said("hi")), "gate": threading.Event()}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            state["asked"].append((self.path, dict(self.headers), json.loads(body)))
            if state["reply"] is None:
                state["gate"].wait(10)
                return
            status, headers, body = state["reply"]
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):  # the client may have had enough
                self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    state["url"] = f"http://127.0.0.1:{listener.server_port}/v1"
    yield state
    state["gate"].set()
    listener.shutdown()
    listener.server_close()
    thread.join()


def failure(*arguments, **options) -> TalkootError:
    with pytest.raises(TalkootError) as caught:
        chat(*arguments, **options)
    return caught.value


def test_an_answer_comes_back_and_the_request_says_what_it_must(server):
    assert chat(server["url"] + "/", "critic", TURN, "secret", max_tokens=7) == "hi"
    path, headers, body = server["asked"][0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert (body["model"], body["messages"], body["max_tokens"]) == ("critic", TURN, 7)


def test_without_a_key_none_is_sent_and_proxies_are_not_asked(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert chat(server["url"], "critic", TURN) == "hi"
    assert "Authorization" not in server["asked"][0][1]


@pytest.mark.parametrize(
    ("reply", "what"),
    [
        ((401, {}, "no such key"), "refused the request"),
        ((500, {}, "oh"), "refused the request"),
        ((302, {"Location": "http://127.0.0.1:9/"}, ""), "refused the request"),
        ((200, {}, "{broken"), "no chat completion"),
        ((200, {}, '{"choices": "none"}'), "no chat completion"),
        ((200, {}, '{"choices": []}'), "empty"),
        ((200, {}, said("")), "empty"),
        ((200, {}, said("half an", "length")), "cut off"),
        ((200, {"Content-Length": "5000"}, said("hi")), "truncated"),
        ((200, {}, "x" * (1 << 22) + "x"), "cannot be used"),
    ],
)
def test_whatever_is_no_whole_answer_is_named(server, reply, what):
    server["reply"] = reply
    error = failure(server["url"], "critic", TURN, "secret")
    assert what in error.what
    assert "secret" not in str(error)
    assert len(server["asked"]) == 1


def test_a_wrong_key_is_named(server):
    server["reply"] = (401, {}, "no such key")
    assert failure(server["url"], "critic", TURN, "secret").next == "check the key"


def test_a_silent_server_is_given_up(server):
    server["reply"] = None
    error = failure(server["url"], "critic", TURN, timeout_s=0.2)
    assert "in time" in error.what
    assert error.code == Exit.UNREACHABLE


def test_a_closed_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        error = failure(f"http://127.0.0.1:{taken.getsockname()[1]}/v1", "critic", TURN)
    assert "nobody listens" in error.what


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/v1",
        "ftp://127.0.0.1/v1",
        "127.0.0.1:80",
        "https://",
        "http://a:b@127.0.0.1/v1",
        "http://[::1",
    ],
)
def test_addresses_that_would_leak_or_mean_nothing_are_not_asked(url):
    assert "not asked" in failure(url, "critic", TURN).what
