"""Served experts as peers of a simulated world: the same service, pool and worker, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from serve_toys import write_model
from talkoot.model.tokenizer import Tokenizer
from talkoot.serve.api.engine import Gone
from talkoot.serve.api.models import Ask, describe, kinds
from talkoot.serve.api.peers import Peers
from talkoot.serve.api.pool import Pool
from talkoot.serve.api.routing import Route
from talkoot.serve.api.service import Gate, Job, Service, Unavailable
from talkoot.serve.api.voices import Voices
from talkoot.world.links import Link, Network
from talkoot.world.sim.simulation import Simulation

BYTES = Tokenizer.bytes()
ALPHABET = "".join(map(chr, range(32, 127)))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Two with one tokenizer, and one with another."""
    folder, other = tmp_path_factory.mktemp("models"), Tokenizer.characters(ALPHABET)
    made = {"first": write_model(folder / "first", 1), "second": write_model(folder / "second", 2)}
    made["stranger"] = write_model(folder / "stranger", 3, other)
    return {name: describe(name, path) for name, path in made.items()}


def simulate(story, sources, peer_flops: float = 1e6):
    """In a world in which a token takes about ten milliseconds."""

    async def aside(work):
        return work()

    async def main(world):
        peers = Peers(world)
        hearing = world.spawn(peers.run(), "hearing")
        pool = Pool(peers.start, clock=world.now)
        service = Service(pool, Voices(aside), Gate(8, 8), clock=world.now)
        try:
            return await story(world, service, pool)
        finally:
            hearing.cancel()

    network = Network(default=Link(latency_s=0.01))
    return Simulation(seed=3, network=network, peer_flops=peer_flops).run(main)


def route(sources, *names: str) -> Route:
    return Route("expert", tuple(sources[name] for name in names))


async def answer(service, job, route, at=None, act=None):
    """All parts; ``act`` is called when ``at`` tokens have come."""
    parts = []
    async for part in service.answer(job, route):
        parts.append(part)
        if at is not None and part.said >= at:
            act()
            at = None
    return parts


def text(parts) -> str:
    return "".join(part.text for part in parts)


JOB = Job("hello", max_tokens=20, temperature=0.0, streamed=True)


def test_a_peer_says_what_the_model_says_here(sources):
    async def story(world, service, pool):
        return await answer(service, JOB, route(sources, "first")), world.now()

    parts, seconds = simulate(story, sources)
    assert text(parts) == BYTES.decode(spoken(sources["first"], BYTES.encode("hello"), 20))
    assert parts[-1].finish == "length"
    assert 0.05 < seconds < 5  # the work took its time, in virtual seconds


def spoken(source, tokens, count) -> list[int]:
    """What a model says after these tokens, here and undisturbed."""
    return [token.id for token in kinds["dense"](source).stream(_ask(tokens, count))]


def _ask(tokens, count) -> Ask:
    return Ask(tokens=tuple(tokens), max_tokens=count)


@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_stream_goes_on_with_the_next_best_from_the_very_token(sources, kind):
    async def story(world, service, pool):
        strike = lambda: world.disturb("first-1", kind)  # noqa: E731
        parts = await answer(service, JOB, route(sources, "first", "second"), at=7, act=strike)
        with pytest.raises(KeyError):  # one that was only silent must not come back
            world.disturb("first-1", "continue")
        return parts

    parts = simulate(story, sources)
    (switch,) = [part.switch for part in parts if part.switch]
    assert (switch.lost, switch.to, switch.kept) == ("first", "second", "tokens")
    assert switch.after >= 7
    assert parts[-1].said == 20
    prompt = BYTES.encode("hello")
    first = spoken(sources["first"], prompt, 20)[: switch.after]
    then = spoken(sources["second"], [*prompt, *first], 20 - switch.after)
    assert text(parts) == BYTES.decode([*first, *then])


def test_a_model_with_another_tokenizer_goes_on_from_the_text(sources):
    async def story(world, service, pool):
        strike = lambda: world.disturb("stranger-1", "kill")  # noqa: E731
        return await answer(service, JOB, route(sources, "stranger", "first"), at=5, act=strike)

    parts = simulate(story, sources)
    (place,) = [number for number, part in enumerate(parts) if part.switch]
    switch = parts[place].switch
    assert (switch.kept, switch.to) == ("text", "first")
    assert parts[-1].said == 20
    before = text(parts[:place])
    assert len(before) == switch.after  # one character per token
    then = spoken(sources["first"], BYTES.encode("hello" + before), 20 - switch.after)
    assert text(parts[place:]) == BYTES.decode(then)


def test_an_answer_that_nobody_saw_begins_again(sources):
    async def story(world, service, pool):
        whole = Job("hello", max_tokens=20, temperature=0.0)
        strike = lambda: world.disturb("first-1", "kill")  # noqa: E731
        return await answer(service, whole, route(sources, "first", "second"), at=6, act=strike)

    parts = simulate(story, sources)
    (place,) = [number for number, part in enumerate(parts) if part.switch]
    assert parts[place].switch.kept == "nothing"
    assert parts[place].switch.after >= 6
    assert text(parts[place:]) == BYTES.decode(spoken(sources["second"], BYTES.encode("hello"), 20))
    assert parts[-1].said == 20


def test_the_lost_one_is_started_again_by_itself(sources):
    async def story(world, service, pool):
        await answer(service, JOB, route(sources, "first"))
        world.disturb("first-1", "kill")
        await world.sleep(30)
        loaded = [slot.backend is not None for slot in pool.slots]
        again = await answer(service, JOB, route(sources, "first"))
        return loaded, pool.slots[0].counts, again

    loaded, counts, again = simulate(story, sources)
    assert loaded == [True]
    assert (counts["loads"], counts["failures"]) == (2, 1)
    assert again[-1].finish == "length"


def test_several_answers_take_turns(sources):
    async def story(world, service, pool):
        async with pool.use(sources["first"]):
            pass
        order = []

        async def one(name):
            async for part in service.answer(JOB, route(sources, "first")):
                if part.text:
                    order.append(name)

        await asyncio.gather(one("a"), one("b"), one("c"))
        return order

    order = simulate(story, sources)
    assert len(order) > 30
    assert {"a", "b", "c"} == set(order[:6])


def test_whoever_leaves_stops_the_work(sources):
    async def story(world, service, pool):
        long = Job("hello", max_tokens=200, temperature=0.0, streamed=True)
        parts = service.answer(long, route(sources, "first"))
        async for part in parts:
            if part.said >= 3:
                break
        await parts.aclose()
        started = world.now()
        await answer(service, JOB, route(sources, "first"))
        return world.now() - started, pool.slots[0].users

    seconds, users = simulate(story, sources)

    async def alone(world, service, pool):
        await answer(service, JOB, route(sources, "first"))
        started = world.now()
        await answer(service, JOB, route(sources, "first"))
        return world.now() - started

    assert seconds < 1.3 * simulate(alone, sources)
    assert users == 0


def test_a_peer_that_cannot_load_its_model_says_why(sources, tmp_path):
    broken = describe("broken", write_model(tmp_path / "broken", 1))
    (tmp_path / "broken/config.json").write_text("{}")

    async def story(world, service, pool):
        with pytest.raises(Unavailable) as told:
            await answer(service, JOB, Route("expert", (broken, broken)))
        return str(told.value)

    assert "config.json is corrupt" in simulate(story, sources)


def test_an_unloaded_peer_ends(sources):
    async def story(world, service, pool):
        await answer(service, JOB, route(sources, "first"))
        backend = pool.slots[0].backend
        await pool.close()
        with pytest.raises(Gone):
            async for _ in backend.answer(_ask([2], 3)):
                pass
        return backend.gone.result()

    assert simulate(story, sources)
