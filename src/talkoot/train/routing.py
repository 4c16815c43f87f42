"""Routes that the peers agree on among themselves, before a step, whenever who holds what has changed.

The lead only starts and ends it: it tells each peer its neighbours and what a hop to them costs, waits until all are
quiet, and makes routes of the lanes that they hold (:mod:`talkoot.plan.flow`). They stand in the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import mean

from talkoot.core.errors import Exit, TalkootError
from talkoot.core.ids import PeerId
from talkoot.plan.flow import Holding, flows
from talkoot.plan.steps import Route, Seat, View
from talkoot.plan.straight import share
from talkoot.train.lead import Lead
from talkoot.train.messages import Negotiate, Neighbour
from talkoot.train.negotiate import Quiet, topic_of
from talkoot.train.records import Routed

LIMIT_PERIODS = 4_000


async def agree_on_routes(lead: Lead) -> None:
    """Have the peers negotiate, unless the routes that stand were made for those who are here.

    Raises:
        PeersLost: somebody went away meanwhile; call it again when the swarm is whole.
        TalkootError: an origin got no lane.
    """
    seats = {seat.name: seat.stage for seat in lead.roster.seats()}
    away = {name: stage for name, stage in lead.routed_for.items() if name not in seats and lead.roster.returns(name)}
    if lead.routes and seats | away == dict(lead.routed_for):
        return
    lead.generation += 1  # messages of an earlier negotiation mean nothing in this one
    view = lead.view(lead.recipe.train.microbatches)
    asked = _questions(view)
    started = lead.world.now()
    for peer, ask in asked.items():
        await lead.tell(peer, "negotiate", ask, lead.step)
    period_s = next(iter(asked.values())).period_s
    await _wait_until_quiet(lead, set(asked), LIMIT_PERIODS * period_s)
    for peer in asked:
        await lead.world.send(peer, topic_of("end", lead.generation), generation=lead.generation)
    holdings = await lead.gather(topic_of("held", lead.generation), asked, Holding, 0)
    lanes = [lane for lane in flows(holdings.values()) if all(peer in lead.roster.members for peer in lane)]
    lead.routes = _routes(view, [tuple(PeerId(peer) for peer in lane) for lane in lanes])
    lead.routed_for = seats
    facts = Routed(routes=lead.routes, reason="negotiated by the peers", seconds=lead.world.now() - started)
    lead.record("train.routes", facts)


async def _wait_until_quiet(lead: Lead, peers: set[PeerId], limit_s: float) -> None:
    noisy, topic = set(peers), topic_of("quiet", lead.generation)
    try:
        async with asyncio.timeout(limit_s):
            while noisy:
                message = await lead.next(topic, noisy)
                if message.topic == topic and message.sender in peers:
                    (noisy.discard if message.read(Quiet).quiet else noisy.add)(message.sender)
    except TimeoutError:
        return  # what stands by now is good enough: lanes are only ever replaced by better ones


def _questions(view: View) -> dict[PeerId, Negotiate]:
    """What each peer is asked, by its own view: its neighbours' stages, links and speeds."""
    last = view.num_stages - 1
    wants = share(view.num_microbatches, [seat.speed for seat in view.holders(0)])
    wanted = {seat.peer: want for seat, want in zip(view.holders(0), wants, strict=True)}
    most = max(1, view.num_microbatches)
    latencies = [view.hop_s(a, b) for a in view.seats for b in view.seats if a.stage != b.stage]
    period_s = max(0.005, mean(latencies or [0.0]))
    asked: dict[PeerId, Negotiate] = {}
    for seat in view.seats:
        near = {seat.stage, (seat.stage - 1) % (last + 1), (seat.stage + 1) % (last + 1)}
        others = [other for other in view.seats if other.stage in near and other.peer != seat.peer]
        places = wanted[seat.peer] if seat.stage == 0 else seat.slots or most
        if seat.stage == 0 and seat.slots:
            places = min(places, seat.slots)
        asked[seat.peer] = Negotiate(
            stage=seat.stage,
            num_stages=view.num_stages,
            places=places,
            neighbours=tuple(Neighbour(other.peer, other.stage, _cost_s(view, seat, other)) for other in others),
            period_s=period_s,
            seed=view.seed,
        )
    return asked


def _cost_s(view: View, one: Seat, other: Seat) -> float:
    """What a link adds to a lane, one way: the mean of both directions, and half of what either end computes."""
    way = (view.hop_s(one, other) + view.hop_s(other, one)) / 2
    return way + 1.5 * (view.forward_s(one) + view.forward_s(other)) / 2  # forward and backward make 3, both ways


def _routes(view: View, lanes: Sequence[tuple[PeerId, ...]]) -> tuple[Route, ...]:
    """Lanes with counts: an origin's next microbatch takes the lane that would have carried all of its own first.

    Raises:
        TalkootError: an origin has microbatches and no lane.
    """
    seats = {seat.peer: seat for seat in view.seats}
    origins = view.holders(0)
    routes: list[Route] = []
    costs = _lane_costs(view, seats, lanes)
    for origin, wanted in zip(origins, share(view.num_microbatches, [seat.speed for seat in origins]), strict=True):
        mine = [index for index, lane in enumerate(lanes) if lane[0] == origin.peer]
        if wanted and not mine:
            raise TalkootError(
                f"the peers found no way for the microbatches of {origin.name}",
                where=f"{len(lanes)} lanes through {view.num_stages} stages",
                why="every stage needs as many free slots as there are origins",
                next="raise swarm.slots, add peers to the smallest stage, or choose another train.planner",
                code=Exit.UNREACHABLE,
            )
        carried = dict.fromkeys(mine, 0)
        for _ in range(wanted):
            carried[min(mine, key=lambda index: ((carried[index] + 1) * costs[index], index))] += 1
        routes += [Route(tuple(seats[p].name for p in lanes[i]), count) for i, count in carried.items() if count]
    return tuple(routes)


def _lane_costs(view: View, seats: Mapping[PeerId, Seat], lanes: Sequence[tuple[PeerId, ...]]) -> list[float]:
    costs: list[float] = []
    for lane in lanes:
        ring = [seats[peer] for peer in (*lane, lane[0])]
        costs.append(sum(_cost_s(view, a, b) for a, b in pairwise(ring)))
    return costs
