"""Negotiating lanes over a world's network: the driver of :class:`~talkoot.plan.flow.FlowNode`.

A peer runs :func:`negotiate` beside its other work: all topics carry the generation, so nothing of an older one
interferes. The lead runs :func:`collect`: it ends the negotiation when every peer is quiet, or time is up, and gets
every peer's part; :func:`~talkoot.plan.flow.flows` makes lanes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import msgspec

from talkoot.core.ids import PeerId
from talkoot.plan.flow import FlowNode, Holding
from talkoot.plan.flow_messages import Card, FlowMessage, Outgoing
from talkoot.world.api import LOST, Message, World


class Quiet(msgspec.Struct, frozen=True):
    """Peer to lead: whether nothing has changed here for long and nothing is left to try."""

    quiet: bool


def topic_of(what: str, generation: int) -> str:
    """The topic of a generation's ``message``, ``quiet``, ``end`` or ``held``."""
    return f"flow/{what}/{generation}"


async def negotiate(
    world: World,
    node: FlowNode,
    *,
    generation: int,
    quiet_s: float,
    limit_s: float,
    reach: Callable[[Card], float | None] | None = None,
    listen_for_losses: bool = True,
) -> Holding:
    """Take part until the lead ends it, the lead is lost, or ``limit_s`` seconds have passed.

    Args:
        node: knows whom it met; keeps its state, so that a later negotiation goes on from there.
        generation: of the run; the same for all who take part.
        quiet_s: without change for so long, the lead is told so.
        reach: for a peer that others introduced: what a hop to it costs in seconds, or None to ignore it.
        listen_for_losses: whether notices of lost peers are taken here; where the caller's own loop takes them, it
            calls ``node.forget``.

    Returns:
        What this peer holds, which the lead has been told.
    """
    flow, end = topic_of("message", generation), topic_of("end", generation)
    topics = (flow, end, LOST) if listen_for_losses else (flow, end)
    period_s = node.settings.period_s
    started = world.now()
    due = started + node.chance.random() * period_s
    quiet = _Quietness(node, quiet_s, started)

    async def send(out: Outgoing) -> None:
        for to, message in out:
            await world.send(PeerId(to), flow, message, generation=generation)

    while world.now() < started + limit_s:
        if world.now() >= due:
            await send(node.tick(world.now()))
            due = max(due + period_s, world.now())
            _meet_strangers(world, node, reach)
            if world.lead is not None and quiet.turned(world.now()):
                await world.send(world.lead, topic_of("quiet", generation), Quiet(quiet.now), generation=generation)
        try:
            message = await world.receive(*topics, timeout=max(0.0, due - world.now()))
        except TimeoutError:
            continue
        if message.topic == flow:
            await send(_taken_in(node, message, world.now()))
        elif message.sender == world.lead:
            break
        elif message.topic == LOST:
            await send(node.forget(message.sender, world.now()))
    if world.lead is not None:
        await world.send(world.lead, topic_of("held", generation), node.holding(), generation=generation)
    return node.holding()


def _taken_in(node: FlowNode, message: Message, now: float) -> Outgoing:
    try:
        content: Any = message.read(FlowMessage)  # type: ignore[arg-type]  # a union is as good as a type
    except ValueError:  # a stranger's nonsense
        return []
    return node.receive(message.sender, content, now)


def _meet_strangers(world: World, node: FlowNode, reach: Callable[[Card], float | None] | None) -> None:
    for card in node.strangers if reach is not None else ():
        hop_s = reach(card) if reach is not None else None
        if hop_s is not None:
            if card.address:
                world.meet(PeerId(card.peer), card.address)
            node.met(card.peer, card.stage, hop_s, card.address)


class _Quietness:
    """Notices when a node has been settled and unchanged for long, and when it no longer is."""

    def __init__(self, node: FlowNode, quiet_s: float, now: float) -> None:
        self.node, self.quiet_s, self.since = node, quiet_s, now
        self.changed, self.now = -1, False

    def turned(self, now: float) -> bool:
        """Whether it became quiet or stopped to be."""
        if self.node.changed != self.changed or not self.node.settled:
            self.changed, self.since = self.node.changed, now
        before, self.now = self.now, now - self.since >= self.quiet_s
        return self.now != before


async def collect(world: World, peers: Collection[PeerId], *, generation: int, limit_s: float) -> list[Holding]:
    """The lead's side: wait until all are quiet or ``limit_s`` seconds have passed, end it, and gather what each holds.

    Peers that get lost or leave meanwhile are left out; so are those that do not answer within ``limit_s`` more
    seconds. A notice of loss is taken from the queue here: the caller compares the answer with whom it asked.
    """
    quiet, held = topic_of("quiet", generation), topic_of("held", generation)
    alive, silent = set(peers), set(peers)
    holdings: dict[str, Holding] = {}
    deadline = world.now() + limit_s
    asked = False
    while alive - holdings.keys():
        if not asked and (not silent or world.now() >= deadline):
            asked, deadline = True, world.now() + limit_s
            for peer in sorted(alive):
                await world.send(peer, topic_of("end", generation), generation=generation)
        try:
            message = await world.receive(quiet, held, LOST, timeout=max(0.0, deadline - world.now()))
        except TimeoutError:
            if asked:
                break
            continue
        if message.topic == LOST:
            alive.discard(message.sender)
            silent.discard(message.sender)
        elif message.sender in alive and message.topic == quiet:
            (silent.discard if message.read(Quiet).quiet else silent.add)(message.sender)
        elif message.sender in alive:
            holding = message.read(Holding)
            if holding.peer == message.sender:
                holdings[message.sender] = holding
    return [holdings[peer] for peer in sorted(holdings) if peer in alive]
