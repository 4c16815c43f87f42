"""Models in memory: loaded once, evicted by age and never at work, started again when lost."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from talkoot.core.errors import TalkootError
from talkoot.serve.api.engine import Gone
from talkoot.serve.api.models import Source
from talkoot.serve.api.pool import RESTARTS, Pool


def source(name: str, weights: int = 1) -> Source:
    return Source(name=name, kind="dense", folders=(name,), stamp="", weights=weights, positions=9)


class Backend:
    process = 0

    def __init__(self) -> None:
        self.gone = asyncio.get_running_loop().create_future()
        self.closed = False

    async def close(self) -> None:
        self.closed = True
        if not self.gone.done():
            self.gone.set_result("closed")


class Yard:
    """Starts such backends, or fails to; remembers which."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.living: dict[str, Backend] = {}
        self.failing: set[str] = set()

    async def __call__(self, source: Source) -> Backend:
        await asyncio.sleep(0)
        self.started.append(source.name)
        if source.name in self.failing:
            raise TalkootError("it is broken", where=source.name, why="", next="")
        backend = self.living[source.name] = Backend()
        return backend


async def breathe() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def play(story, memory: int | None = None, clock=lambda: 0.0):
    async def main():
        yard = Yard()
        return await story(Pool(yard, memory, clock), yard)

    return asyncio.run(main())


def test_a_model_is_loaded_once_for_all_who_ask():
    async def story(pool, yard):
        async def visit():
            async with pool.use(source("a")) as (_, backend):
                return backend

        assert len({id(one) for one in await asyncio.gather(*(visit() for _ in range(5)))}) == 1
        assert yard.started == ["a"]

    play(story)


def test_the_longest_unused_model_goes_first():
    now = iter(range(100))

    async def story(pool, yard):
        for name in ("a", "b", "a", "c"):
            async with pool.use(source(name)):
                pass
        assert (yard.living["b"].closed, yard.living["a"].closed) == (True, False)
        async with pool.use(source("b")):
            pass
        assert yard.living["a"].closed
        held = {slot.source.name: slot.held for slot in pool.slots}
        assert held == {"a": 0, "b": 1, "c": 1}
        assert sum(slot.counts["evictions"] for slot in pool.slots) == 2

    play(story, memory=2, clock=lambda: next(now))


def test_a_model_at_work_is_never_evicted_and_others_wait_for_it():
    async def story(pool, yard):
        async with AsyncExitStack() as held:
            await held.enter_async_context(pool.use(source("a", 2)))

            async def want():
                async with pool.use(source("b", 2)) as (_, backend):
                    return backend

            waiting = asyncio.create_task(want())
            await breathe()
            assert not waiting.done()
            assert yard.started == ["a"]
        assert (await waiting) is yard.living["b"]
        assert yard.living["a"].closed

    play(story, memory=3)


def test_a_model_that_never_fits_is_refused():
    async def story(pool, yard):
        with pytest.raises(TalkootError, match="does not fit"):
            async with pool.use(source("a", 9)):
                pass
        assert yard.started == []

    play(story, memory=8)


def test_a_lost_model_is_started_again_but_not_for_ever():
    async def story(pool, yard):
        async with pool.use(source("a")) as (slot, _):
            pass
        for _ in range(RESTARTS + 3):
            if not (backend := yard.living["a"]).gone.done():
                backend.gone.set_result("killed")
            await breathe()
        assert yard.started == ["a"] * (RESTARTS + 1)
        assert not pool.healthy(source("a"))
        async with pool.use(source("a")) as (slot, _):  # somebody asks for it by name: one more try
            slot.spoke(0.1)
        assert pool.healthy(source("a"))
        assert slot.counts["failures"] == RESTARTS + 1
        assert slot.held == 1

    play(story)


def test_one_that_ended_while_it_was_used_is_not_given_to_the_next():
    async def story(pool, yard):
        async with pool.use(source("a")) as (_, first):
            first.gone.set_result("killed")
            async with pool.use(source("a")) as (_, second):
                assert second is not first

    play(story)


def test_a_failed_start_holds_no_memory_and_everybody_hears_of_it():
    async def story(pool, yard):
        yard.failing.add("a")

        async def visit():
            with pytest.raises(TalkootError, match="broken"):
                async with pool.use(source("a", 5)):
                    pass

        await asyncio.gather(visit(), visit())
        assert yard.started == ["a"]
        async with pool.use(source("b", 5)):
            assert sum(slot.held for slot in pool.slots) == 5

    play(story, memory=5)


def test_what_is_not_served_any_more_goes_when_its_last_user_leaves():
    async def story(pool, yard):
        async with pool.use(source("a")):
            pool.retire([source("b")])
            await breathe()
            assert not yard.living["a"].closed
        await breathe()
        assert yard.living["a"].closed
        assert pool.slots == []

    play(story)


def test_a_request_from_before_a_change_leaves_nothing_behind():
    async def story(pool, yard):
        pool.retire([source("b")])
        async with pool.use(source("a")):
            pass
        await breathe()
        assert yard.living["a"].closed
        assert pool.slots == []

    play(story)


def test_whoever_waits_may_leave_and_the_load_goes_on():
    async def story(pool, yard):
        async def visit():
            async with pool.use(source("a")):
                pass

        task = asyncio.create_task(visit())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await breathe()
        assert yard.started == ["a"]
        assert pool.slots[0].backend is yard.living["a"]
        assert pool.slots[0].users == 0
        await pool.close()
        assert yard.living["a"].closed

    play(story)


def test_a_start_that_is_lost_is_told_as_such():
    async def story(pool, yard):
        async def start(source):
            raise Gone("killed")

        pool._start = start
        with pytest.raises(Gone):
            async with pool.use(source("a")):
                pass

    play(story)
