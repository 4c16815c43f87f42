"""Served experts for real: over sockets, in processes that are killed, while experts come and go."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket

import httpx
import pytest
from processes import DEADLINE, alive, descendants, start, stop, talkoot, wait_for

from serve_toys import chat, events, served, write_blend, write_model, write_newcomer, write_routed
from talkoot.blend.changes import remove_expert
from talkoot.blend.folder import Blend
from talkoot.serve.api.catalogue import Catalogue
from talkoot.serve.api.server import Settings

CHAT = "/v1/chat/completions"


def run(story):
    asyncio.run(asyncio.wait_for(story, DEADLINE))


async def lines(answer):
    """Chunks as they come."""
    async for line in answer.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_kill_9_of_the_speaking_process_is_no_end(tmp_path, streamed):
    write_blend(tmp_path, "cat", "dog", positions=4096)

    async def story():
        async with served(tmp_path, Settings(remote=True)) as (address, api):
            async with httpx.AsyncClient(base_url=address, timeout=DEADLINE) as client:
                wish = chat("cat", max_tokens=1500, temperature=0)
                await client.post(CHAT, json=chat("dog"))
                await client.post(CHAT, json=chat("cat"))
                processes = {n: m["process"] for n, m in (await client.get("/health")).json()["models"].items()}
                assert processes["cat"] != processes["dog"] != os.getpid()
                if streamed:
                    body = await _streamed(client, wish, processes["cat"])
                else:
                    body = await _whole(client, api, wish, processes["cat"])
                (switch,) = body["talkoot"]["switched"]
                assert (switch["from"], switch["to"]) == ("cat", "dog")
                assert switch["went_on_from"] == ("tokens" if streamed else "nothing")
                assert not alive(processes["cat"])
                again = await client.post(CHAT, json=chat("x", "cat"))
                assert again.json()["talkoot"]["expert"] == "cat"
                now = (await client.get("/health")).json()["models"]["cat"]
                assert now["process"] not in (0, processes["cat"])
                assert 'failures_total{expert="cat"} 1' in (await client.get("/metrics")).text
            return now["process"]

    async def whole_story():
        assert not alive(await story())

    run(whole_story())


async def _streamed(client, wish, process):
    said, bodies = 0, []
    async with client.stream("POST", CHAT, json={**wish, "stream": True}) as answer:
        assert answer.headers["x-talkoot-expert"] == "cat"
        async for chunk in lines(answer):
            said += len(chunk["choices"][0]["delta"]["content"])
            bodies.append(chunk)
            if said > 20 and alive(process):
                os.kill(process, signal.SIGKILL)
    assert bodies[-1]["choices"][0]["finish_reason"] == "length"
    switches = [one["talkoot"]["switched"][0] for one in bodies[:-1] if "switched" in one.get("talkoot", {})]
    assert switches
    assert switches[0]["after_tokens"] > 0
    return bodies[-1]


async def _whole(client, api, wish, process):
    asked = asyncio.create_task(client.post(CHAT, json=wish))
    slot = next(slot for slot in api.service.pool.slots if slot.source.name == "cat")
    before = slot.counts["tokens"]
    while slot.counts["tokens"] < before + 20:
        await asyncio.sleep(0.001)
    os.kill(process, signal.SIGKILL)
    body = (await asked).json()
    assert body["usage"]["completion_tokens"] == 1500
    return body


@pytest.mark.parametrize("remote", [False, True], ids=["threads", "peers"])
def test_no_request_is_dropped_while_experts_come_and_go(tmp_path, remote):
    folder = write_routed(tmp_path / "blend", "cat", "dog", general=True)
    wish = write_newcomer(tmp_path, folder)
    asked, done = 0, asyncio.Event()

    async def client_loop(client, number):
        nonlocal asked
        seen = set()
        while not done.is_set():
            body = chat(
                f"{('cat', 'dog', 'cow')[asked % 3]} {number}", max_tokens=6, temperature=0, stream=number % 2 == 0
            )
            asked += 1
            answer = await client.post(CHAT, json=body)
            assert answer.status_code == 200, answer.text
            if number % 2 == 0:
                *chunks, end = events(answer.text)
                assert end == "[DONE]"
                assert chunks[-1]["choices"][0]["finish_reason"] == "length"
                seen.add(chunks[-1]["talkoot"]["expert"])
            else:
                assert answer.json()["usage"]["completion_tokens"] == 6
                seen.add(answer.json()["talkoot"]["expert"])
        return seen

    async def come_and_go(client):
        for turn in range(2):
            assert (await client.post("/v1/experts", json=wish)).status_code == 201
            await _more(30)
            if turn == 0:
                assert (await client.delete("/v1/experts/cow")).status_code == 200
            else:
                await asyncio.to_thread(remove_expert, folder, "cow")  # as another process would
            await _more(20)
        done.set()

    async def _more(count):
        until = asked + count
        while asked < until:
            await asyncio.sleep(0.005)

    async def story():
        async with served(Catalogue(folder), Settings(remote=remote)) as (address, _api):
            async with httpx.AsyncClient(base_url=address, timeout=DEADLINE) as client:
                loops = [client_loop(client, number) for number in range(8)]
                *seen, _ = await asyncio.gather(*loops, come_and_go(client))
                assert set.union(*seen) == {"cat", "dog", "cow"}
                assert "switches_total 0" in (await client.get("/metrics")).text
                assert Blend.open(folder).names == ("cat", "dog")

    run(story())


def test_nothing_is_computed_for_a_client_that_hung_up(tmp_path):
    write_blend(tmp_path, "cat", positions=4096)

    async def story():
        async with served(tmp_path) as (address, api):
            async with httpx.AsyncClient(base_url=address, timeout=DEADLINE) as client:
                wish = chat("cat", "cat", max_tokens=4000, temperature=0)
                async with client.stream("POST", CHAT, json={**wish, "stream": True}) as answer:
                    async for _ in lines(answer):
                        break
                await _idle(api)
                with pytest.raises(httpx.ReadTimeout):
                    await client.post(CHAT, json=wish, timeout=0.2)
                await _idle(api)
                assert api.service.pool.slots[0].counts["tokens"] < 4000
                assert (await client.post(CHAT, json=chat("cat"))).status_code == 200

    async def _idle(api):
        while api.service.pool.slots[0].users:
            await asyncio.sleep(0.01)
        before = api.service.pool.slots[0].counts["tokens"]
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert api.service.pool.slots[0].counts["tokens"] == before

    run(story())


def test_a_full_queue_turns_requests_away_with_a_time_to_come_back(tmp_path):
    write_blend(tmp_path, "cat", positions=4096)

    async def story():
        async with served(tmp_path, Settings(running=1, waiting=1)) as (address, api):
            async with httpx.AsyncClient(base_url=address, timeout=DEADLINE) as client:
                wish = chat("cat", "cat", max_tokens=4000, temperature=0)
                running = asyncio.create_task(client.post(CHAT, json=wish))
                while not api.service.pool.slots:
                    await asyncio.sleep(0.01)
                waiting = asyncio.create_task(client.post(CHAT, json=chat("cat", "cat")))
                while not api.service.gate.queued:
                    await asyncio.sleep(0.01)
                turned = await client.post(CHAT, json=wish)
                assert (turned.status_code, turned.json()["error"]["code"]) == (429, "queue_full")
                assert int(turned.headers["retry-after"]) > 0
                running.cancel()
                assert (await waiting).status_code == 200

    run(story())


@pytest.mark.parametrize("flags", [[], ["--remote"]], ids=["threads", "peers"])
def test_the_command_says_where_and_ends_in_order(tmp_path, flags):
    folder = write_model(tmp_path / "model", 1, positions=4096)
    process = start("serve", folder, "--port", 0, "--memory", "1MB", *flags, folder=tmp_path)
    try:
        said = tmp_path / "said.txt"
        wait_for(lambda: "curl" in said.read_text(), process)
        address = re.search(r"at (http://127.0.0.1:\d+)/v1", said.read_text())[1]
        answer = httpx.post(address + CHAT, json=chat("x"), timeout=DEADLINE).json()
        assert answer["usage"]["completion_tokens"] == 8
        children = descendants(process.pid)
        assert bool(flags) == bool(children)
        wish = chat("x", max_tokens=4000, stream=True, temperature=0)
        with httpx.stream("POST", address + CHAT, json=wish, timeout=DEADLINE) as open_answer:
            text = open_answer.iter_text()
            next(text)
            for _ in range(2):  # an impatient user: what was begun in order ends in order
                process.send_signal(signal.SIGINT)
            *_, error, done = events("".join(text))
        assert (error["error"]["code"], done) == ("stopping", "[DONE]")
        assert process.wait(DEADLINE) == 0
        wait_for(lambda: not any(map(alive, children)))
        assert "Traceback" not in said.read_text()
    finally:
        stop(process)


def test_what_cannot_be_served_is_said_in_a_sentence(tmp_path):
    folder = write_model(tmp_path / "model", 1)
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = holder.getsockname()[1]
        for arguments, said in [
            ((folder, "--port", taken), "already in use"),
            ((folder, "--host", "0.0.0.0"), "needs a token"),
            ((tmp_path / "nowhere",), "the folder does not exist"),
            ((tmp_path,), "holds no blend"),
            ((folder, "--memory", "lots"), "no amount of memory"),
            ((folder, "--mode-for-unknown", "generl"), "did you mean 'general'"),
        ]:
            done = talkoot("serve", *arguments)
            assert (done.returncode, said in done.stderr) == (2, True), done.stderr
