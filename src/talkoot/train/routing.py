"""Routes made anew between two steps, when who holds what has changed, or how fast they are; they stand in the log.

Planner ``flow`` has the peers agree on them. The lead only starts and ends it: it tells each peer its neighbours and
what a hop to them costs, waits until all are quiet, and makes routes of the lanes that they hold
(:mod:`talkoot.plan.flow`). Planner ``routes`` has the lead search for them (:mod:`talkoot.plan.search_routes`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from talkoot.core.errors import Exit, TalkootError
from talkoot.core.ids import PeerId
from talkoot.plan.dispatch import lane_counts
from talkoot.plan.flow import Holding, flows
from talkoot.plan.problem import Problem, Rules
from talkoot.plan.search_routes import find_routes
from talkoot.plan.steps import Route, Seat, View
from talkoot.plan.straight import share
from talkoot.train.lead import Lead
from talkoot.train.messages import Negotiate, Neighbour
from talkoot.train.negotiate import Quiet, topic_of
from talkoot.train.records import Routed

LIMIT_PERIODS = 4_000
EFFORT = 3_000  # iterations played while the swarm waits for new routes


async def refresh_routes(lead: Lead) -> None:
    """Make new routes unless those that stand were made for who is here and how fast they are.

    Raises:
        PeersLost: somebody went away meanwhile; call it again when the swarm is whole.
        TalkootError: there is no way for some microbatch.
    """
    planner = lead.recipe.train.planner
    if planner not in ("flow", "routes"):
        return
    seats = {seat.name: seat.stage for seat in lead.roster.seats()}
    away = {name: stage for name, stage in lead.routed_for.items() if name not in seats and lead.roster.returns(name)}
    speeds = lead.drift.news()
    lead.roster.measured |= speeds
    if lead.routes and seats | away == dict(lead.routed_for) and not speeds:
        return
    started = lead.world.now()
    if planner == "flow":
        routes, reason = await _negotiate(lead), "negotiated by the peers"
    else:
        routes, reason = _search(lead), "planned anew, as speeds changed" if speeds else "planned anew for who is here"
    lead.routes, lead.routed_for = routes, seats
    lead.record("train.routes", Routed(routes=routes, reason=reason, seconds=lead.world.now() - started))


def _search(lead: Lead) -> tuple[Route, ...]:
    """Routes for the peers as they are seated, by the planner that made the first ones."""
    view = lead.view(lead.recipe.train.microbatches)
    many = max(1, view.num_microbatches)
    problem = Problem(
        names=tuple(seat.name for seat in view.seats),
        hop_s=tuple(tuple(view.hop_s(a, b) for b in view.seats) for a in view.seats),
        busy_s=tuple(tuple(0.0 for _ in view.seats) for _ in view.seats),
        share_s=tuple(tuple(0.0 for _ in view.seats) for _ in view.seats),
        layer_s=tuple(1.0 / seat.speed for seat in view.seats),
        stage_layers=tuple(view.stage_s),
        slots=tuple(seat.slots or many for seat in view.seats),
        backward_ratio=2.0,
        loss_ratio=view.loss_s / view.stage_s[0] if view.stage_s[0] else 0.0,
    )
    groups = [[i for i, seat in enumerate(view.seats) if seat.stage == stage] for stage in range(view.num_stages)]
    rules = _rules(lead)
    found = find_routes(problem, groups, rules, view.num_microbatches, seed=view.seed, effort=EFFORT, quotas="free")
    names = problem.names
    return tuple(Route(tuple(names[i] for i in (ln.origin, *ln.relays)), ln.count) for ln in found.lanes if ln.count)


def _rules(lead: Lead) -> Rules:
    """What the recipe's own routes permit themselves: how many stages they visit, and swaps only where they swap."""
    homes = lead.recipe.swarm.peers
    ways = [[homes[name] for name in route.peers] for route in lead.recipe.routes]
    visits = max(map(len, ways))
    return Rules(visits=visits) if any(way != sorted(way) for way in ways) else Rules(visits=visits, max_swap=0)


async def _negotiate(lead: Lead) -> tuple[Route, ...]:
    lead.generation += 1  # messages of an earlier negotiation mean nothing in this one
    view = lead.view(lead.recipe.train.microbatches)
    asked = _questions(view)
    for peer, ask in asked.items():
        await lead.tell(peer, "negotiate", ask, lead.step)
    period_s = next(iter(asked.values())).period_s
    # Content peers are silent: the lead must not take that for a swarm that stands still.
    await _wait_until_quiet(lead, set(asked), min(LIMIT_PERIODS * period_s, 0.8 * lead.recipe.train.patience_s))
    for peer in asked:
        await lead.world.send(peer, topic_of("end", lead.generation), generation=lead.generation)
    holdings = await lead.gather(topic_of("held", lead.generation), asked, Holding, 0)
    stages = {seat.peer: seat.stage for seat in view.seats}
    for peer, holding in holdings.items():
        if (holding.peer, holding.stage) != (peer, stages[peer]) or len(holding.places) > 2 * asked[peer].places:
            lead.expel(peer, "it claims places in lanes that it does not have")
    lanes = [tuple(map(PeerId, lane)) for lane in flows(holdings.values())]
    whole = list(range(view.num_stages))
    return _routes(view, [lane for lane in lanes if [stages.get(peer) for peer in lane] == whole])


async def _wait_until_quiet(lead: Lead, peers: set[PeerId], limit_s: float) -> None:
    noisy, topic = set(peers), topic_of("quiet", lead.generation)
    try:
        async with asyncio.timeout(limit_s):
            while noisy:
                message = await lead.next(topic, noisy)
                if message.topic == topic and message.sender in peers:
                    try:
                        quiet = message.read(Quiet).quiet
                    except ValueError as problem:
                        lead.expel(message.sender, f"its word in the negotiation makes no sense: {problem}")
                    (noisy.discard if quiet else noisy.add)(message.sender)
    except TimeoutError:
        return  # what stands by now is good enough: lanes are only ever replaced by better ones


def _questions(view: View) -> dict[PeerId, Negotiate]:
    """What each peer is asked, by its own view: its neighbours' stages, links and speeds."""
    last = view.num_stages - 1
    wants = share(view.num_microbatches, [seat.speed for seat in view.holders(0)])
    wanted = {seat.peer: want for seat, want in zip(view.holders(0), wants, strict=True)}
    most = max(1, view.num_microbatches)
    hops_s = sorted(view.hop_s(a, b) for a in view.seats for b in view.seats if a.peer != b.peer)
    period_s = max(0.005, hops_s[len(hops_s) * 9 // 10]) if hops_s else 0.005  # most answers come within two
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
    """Lanes with counts; origins may get unlike numbers of microbatches, or none.

    Raises:
        TalkootError: there is no lane.
    """
    if not lanes:
        raise TalkootError(
            "the peers found no way for the microbatches",
            where=f"{view.num_stages} stages, {len(view.seats)} peers",
            why="not one lane through all stages came about",
            next="choose another train.planner, or report this with the run's folder",
            code=Exit.UNREACHABLE,
        )
    seats = {seat.peer: seat for seat in view.seats}
    ways = [[seats[peer] for peer in lane] for lane in lanes]
    counts = lane_counts(view, ways)
    return tuple(
        Route(tuple(seat.name for seat in way), count) for way, count in zip(ways, counts, strict=True) if count
    )
