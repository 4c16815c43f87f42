"""Learning from a critic behind the OpenAI protocol: a real server on this machine, peers in processes of their own."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from processes import read_log, talkoot
from test_tune_kit import Run, recipe, run

from talkoot.core.fold import fold
from talkoot.tune.distil.critics.arithmetic import aligned
from talkoot.tune.distil.critics.critic import Rollout
from talkoot.tune.rewards.result import RewardResult
from talkoot.tune.tasks.task import Item

ROUNDS, ROLLOUTS = 3, 8  # of a peer in a round
KEY = "the key of the test"
SECTIONS: dict[str, Any] = {
    "task": "addition:2,hard",
    "model": {"width": 32, "heads": 2, "context": 96, "tokenizer": "characters"},
    "rollout": {"prompts": ROLLOUTS, "samples": 1, "max_new_tokens": 0},
    "warm": {"steps": 30, "batch": 32},
    "tune": {"rounds": ROUNDS},
}


class Server(ThreadingHTTPServer):
    """Answers chat completions as the arithmetic critic would, from what the request says alone.

    Attributes:
        asked: every request's body, in no order.
        keys: how often each Authorization header came.
        broken: refuse every problem whose first digit is odd.
    """

    daemon_threads = True

    def __init__(self, broken: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.keys: Counter[str] = Counter()
        self.broken = broken

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.keys[self.headers.get("Authorization", "")] += 1
        if self.path != "/v1/chat/completions":
            return self._send(404, {"error": "not here"})
        request = body["messages"][-1]["content"]
        if self.server.broken and int(part(request, "problem")[0]) % 2:
            return self._send(500, {"error": "out of order"})
        text = f"<think>a <rewritten>draft</rewritten></think>Gladly:\n<rewritten>\n{critique(request)}\n</rewritten>"
        answer = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop", "index": 0}
        return self._send(200, {"object": "chat.completion", "model": body["model"], "choices": [answer]})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def part(request: str, name: str) -> str:
    """What stands between a request's tags."""
    found = re.search(rf"(?s)<{name}>\n(.*?)\n</{name}>", request)
    assert found is not None, f"no {name} in {request!r}"
    return found[1]


def critique(request: str) -> str:
    """What the arithmetic critic says of the attempt in a request."""
    attempt = re.sub(r"</?step_\d+>", "", part(request, "attempt"))
    item = Item(prompt=part(request, "problem"), answer="", solution="")
    return aligned(Rollout(item, attempt, RewardResult(0.0, "wrong"))).context


@contextmanager
def serving(broken: bool = False) -> Iterator[Server]:
    """A server that runs."""
    server = Server(broken)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def tune(server: Server, folder: Path) -> Run:
    """``talkoot tune`` with this server as critic, as a user would."""
    critic = {"kind": "openai", "base_url": server.url, "model": "critic-of-the-test", "key_variable": "CRITIC_KEY"}
    path = folder / "recipe.json"
    path.write_text(json.dumps(recipe(**SECTIONS, critic=critic).plain()))
    done = talkoot("tune", path, "--out", folder / "run", "--json", env={"CRITIC_KEY": KEY})
    assert done.returncode == 0, done.stdout + done.stderr
    log = read_log(folder / "run")
    return Run(None, log, fold(log))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def computed() -> Run:
    """The same run with the critic that computes, rehearsed."""
    return run(recipe(**SECTIONS, critic={"kind": "arithmetic"}))


def test_a_critic_that_is_asked_teaches_the_same_bits_as_one_that_computes_the_same(tmp_path, computed):
    with serving() as server:
        done = tune(server, tmp_path)
    assert done.hashes == computed.hashes
    for name in ("alder", "birch"):
        # Both peers learn from all rollouts, their own and the other's, each with a critique of its own asking.
        assert [u.counts["feedback critique"] for u in done.updates(name)] == [2 * ROLLOUTS] * ROUNDS
        assert [u.learned for u in done.updates(name)] == [u.learned for u in computed.updates(name)]
    assert len(server.asked) == 2 * 2 * ROLLOUTS * ROUNDS
    assert server.keys == {f"Bearer {KEY}": len(server.asked)}
    assert {request["model"] for request in server.asked} == {"critic-of-the-test"}
    shown = (tmp_path / "recipe.json").read_text() + "".join(map(repr, done.entries))
    assert KEY not in shown  # receipts are public


def test_a_server_that_fails_for_some_leaves_those_out_says_so_and_the_run_goes_on(tmp_path, computed):
    with serving(broken=True) as server:
        done = tune(server, tmp_path)
    for name in ("alder", "birch"):
        for update in done.updates(name):
            taught = update.counts.get("feedback critique", 0)
            refused = update.counts.get("skipped critic failed: the server refused the request", 0)
            unasked = update.counts.get("skipped critic not asked", 0)
            assert taught + refused + unasked == 2 * ROLLOUTS
        assert sum(u.counts.get("feedback critique", 0) for u in done.updates(name)) > 0
        assert sum(u.counts.get("skipped critic failed: the server refused the request", 0) for u in done.updates(name))
        assert done.updates(name)[-1].round == ROUNDS - 1
    assert done.hashes != computed.hashes
