"""What all servers share: where they listen, and that nothing waits without need."""

from __future__ import annotations

import asyncio
import socket

import pytest

from talkoot.core.errors import TalkootError
from talkoot.serve.web import address_of, bind, check_open, hosts_for


def test_small_answers_are_sent_at_once():
    async def story():
        listener, seen = bind("127.0.0.1", 0), asyncio.get_running_loop().create_future()

        async def greet(reader, writer):
            seen.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(greet, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            writer.close()
            return await seen

    assert asyncio.run(story()) != 0


def test_an_address_is_written_as_a_browser_reads_it():
    with bind("127.0.0.1", 0) as listener:
        assert address_of("127.0.0.1", listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert address_of("::1", listener).startswith("http://[::1]:")


def test_only_loopback_is_open_without_a_token():
    check_open("127.0.0.1", None, "why")
    check_open("0.0.0.0", "sesame", "why")
    with pytest.raises(TalkootError, match="needs a token"):
        check_open("0.0.0.0", "", "why")
    assert hosts_for("0.0.0.0") is None
    assert "127.0.0.2" in hosts_for("127.0.0.2")
