"""The mailbox: nothing is lost, doubled or reordered, whoever is cancelled when."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from talkoot.core.ids import PeerId
from talkoot.world.api import LOST, Blank, Message
from talkoot.world.mailbox import MESSAGE_BYTES, Mailbox

TOPICS = ["a", "b", "c"]


def message(topic: str, number: int = 0, nbytes: int = 0) -> Message:
    return Message(PeerId("p"), topic, number, 0, bytes(nbytes))


class MailboxMachine(RuleBasedStateMachine):
    """Puts, takers, cancellations and discards in any order, against one plain list."""

    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.mailbox = Mailbox()
        self.waiting: list[Message] = []  # the model: what was put and not taken
        self.takers: list[tuple[asyncio.Task, tuple[str, ...]]] = []
        self.count = 0

    def settle(self) -> None:
        async def turn() -> None:
            for _ in range(4):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turn())

    def collect(self, *, in_order: bool) -> None:
        """What takers got was the first of its topics, unless cancellations and deliveries crossed."""
        for task, topics in list(self.takers):
            if not task.done():
                continue
            self.takers.remove((task, topics))
            if task.cancelled():
                continue
            got = task.result()
            assert got.topic in topics
            assert got in self.waiting
            if in_order:
                assert got is next(held for held in self.waiting if held.topic in topics)
            self.waiting.remove(got)

    @rule(topic=st.sampled_from(TOPICS))
    def put(self, topic: str) -> None:
        self.count += 1
        put = message(topic, self.count)
        self.waiting.append(put)
        self.mailbox.put(put)
        self.settle()
        self.collect(in_order=True)

    @rule(topics=st.lists(st.sampled_from(TOPICS), min_size=1, max_size=4))
    def take(self, topics: list[str]) -> None:
        self.takers.append((self.loop.create_task(self.mailbox.take(*topics)), tuple(topics)))
        self.settle()
        self.collect(in_order=True)

    @precondition(lambda self: self.takers)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.takers))[0].cancel()
        self.settle()
        self.collect(in_order=True)

    @precondition(lambda self: self.takers)
    @rule(data=st.data())
    def cancel_as_messages_arrive(self, data: st.DataObject) -> None:
        """The receiver's timeout strikes in the very turn in which its message comes."""
        for _ in range(data.draw(st.integers(1, 4))):
            topic = data.draw(st.sampled_from(TOPICS))
            self.count += 1
            put = message(topic, self.count)
            self.waiting.append(put)
            self.mailbox.put(put)
        for task, _ in data.draw(st.lists(st.sampled_from(self.takers), unique_by=id)):
            task.cancel()
        self.settle()
        self.collect(in_order=False)

    @rule(topic=st.sampled_from(TOPICS), odd=st.booleans())
    def discard(self, topic: str, odd: bool) -> None:
        def stale(held: Message) -> bool:
            return held.topic == topic and held.generation % 2 == odd

        self.mailbox.discard(stale)
        self.waiting = [held for held in self.waiting if not stale(held)]

    @invariant()
    def nobody_waits_beside_what_he_waits_for(self) -> None:
        if not hasattr(self, "mailbox"):
            return
        wanted = {topic for _, topics in self.takers for topic in topics}
        assert self.mailbox.wanted == sorted(wanted)
        assert not self.mailbox.holds(*wanted)
        assert len(self.mailbox) == len(self.waiting)

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        for task, _ in self.takers:
            task.cancel()
        self.settle()
        left = []
        while len(self.mailbox):
            left.append(self.loop.run_until_complete(self.mailbox.take(*TOPICS)))
        assert left == self.waiting  # all of it, in order of arrival
        assert self.mailbox._bytes == 0
        self.loop.close()


MailboxMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestMailbox = MailboxMachine.TestCase


def test_a_message_given_to_a_cancelled_taker_goes_to_the_next_one():
    async def main():
        mailbox = Mailbox()
        first, second = (asyncio.ensure_future(mailbox.take("a")) for _ in range(2))
        await asyncio.sleep(0)
        mailbox.put(message("a", 7))
        first.cancel()
        async with asyncio.timeout(5):
            assert (await second).generation == 7
        assert first.cancelled()

    asyncio.run(main())


def test_cancelled_takers_give_back_in_order():
    async def main():
        mailbox = Mailbox()
        takers = [asyncio.ensure_future(mailbox.take("a")) for _ in range(3)]
        await asyncio.sleep(0)
        for number in range(4):
            mailbox.put(message("a", number))
        for taker in takers:
            taker.cancel()
        await asyncio.gather(*takers, return_exceptions=True)
        assert [(await mailbox.take("a")).generation for _ in range(4)] == [0, 1, 2, 3]

    asyncio.run(main())


def test_a_flood_is_dropped_and_counted_but_losses_pass():
    async def main():
        mailbox = Mailbox(limit=2 * (MESSAGE_BYTES + 100))
        for number in range(4):
            mailbox.put(message("a", number, 100))
        assert (len(mailbox), mailbox.dropped) == (2, 2)
        mailbox.put(message("b"))  # empty ones take room as well
        assert mailbox.dropped == 3
        mailbox.put(message(LOST))
        assert mailbox.holds(LOST)
        mailbox.discard(lambda held: held.topic == LOST)
        assert (await mailbox.take("a")).generation == 0
        mailbox.put(message("a", 5, 100))
        assert [(await mailbox.take("a")).generation for _ in range(2)] == [1, 5]
        assert len(mailbox) == 0

    asyncio.run(main())


def test_a_waiting_taker_is_served_beyond_any_limit():
    async def main():
        mailbox = Mailbox(limit=0)
        taker = asyncio.ensure_future(mailbox.take("a"))
        await asyncio.sleep(0)
        mailbox.put(message("a", 1, 1000))
        assert (await taker).generation == 1
        assert mailbox.dropped == 0

    asyncio.run(main())


def test_messages_describe_themselves():
    sent = Message(PeerId("p" * 64), "topic", 1, 2, b"body", [b"abc", Blank(7), memoryview(bytearray(8)).cast("d")])
    assert sent.nbytes == 4 + 3 + 7 + 8
    assert repr(sent) == "Message('topic' from pppppppp, generation 1, step 2)"
    assert len(Blank(7)) == 7
    with pytest.raises(ValueError):
        sent.read(int)
