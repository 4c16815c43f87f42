"""A step that goes on although peers are lost in it: the lead takes stock, decides, and tells everybody the new paths.

The policies are in :mod:`talkoot.plan.repair`. Whoever was lost takes its partial sums along, so each of its visits is
a hole, whatever it had done: the peer that takes over computes it again, bit for bit, and the step's gradient is that
of a step without a crash.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import msgspec

from talkoot.core.ids import PeerId
from talkoot.plan.repair import Mending, Progress, Repair, Wound, repairs
from talkoot.plan.steps import Path, StepPlan, validate
from talkoot.train.crew import PeersLost, Stalled
from talkoot.train.lead import Lead
from talkoot.train.messages import Amend, Begin, Census, Item, Mix, Prepared, Standing, Stream
from talkoot.train.records import Mended
from talkoot.train.states import RUN


class Situation(msgspec.Struct, frozen=True):
    """A step under way.

    Attributes:
        plan: the paths as they are now.
        attempts: how often each stage had to start its mixing again.
        stocktakings: how often the lead asked who had done what.
        rounds: how often a microbatch had to begin again.
        streams: who gets each stage's gradient.
    """

    plan: StepPlan
    attempts: Mapping[int, int] = {}
    stocktakings: int = 0
    rounds: Mapping[int, int] = {}
    streams: Mapping[int, tuple[Stream, ...]] = {}


def share_of(lead: Lead, situation: Situation, peer: PeerId, stage: int, *, evaluate: bool) -> Begin:
    """What one peer is told at the beginning of a step."""
    plan = situation.plan
    order = plan.orders.get(peer, ())
    return Begin(
        num_microbatches=len(plan.paths),
        items=items_of(plan.paths, peer, plan.ring, situation.rounds),
        order=tuple(work for work in order if work.phase == "forward") if evaluate else order,
        mix=mix_of(lead, situation, peer, stage),
        ring=plan.ring,
        slots=slots_of(plan, peer, lead.roster.slots(lead.roster.name_of(peer))),
        evaluate=evaluate,
    )


def slots_of(plan: StepPlan, peer: PeerId, slots: int) -> int:
    """How many microbatches a peer may hold at once; 0 = any number.

    Where stages are swapped, waiting for a slot could go round in a circle, so a stand-in takes whatever its lanes
    may bring at once; the lanes of those who are where they were planned fit their slots.
    """
    if not plan.ring or not slots:
        return 0
    if all([hop.stage for hop in path.hops] == sorted(hop.stage for hop in path.hops) for path in plan.paths):
        return slots
    mine = {path.microbatch for path in plan.paths if any(hop.peer == peer for hop in path.hops)}
    return max(slots, sum(path.after not in mine for path in plan.paths if path.microbatch in mine))


def items_of(
    paths: Iterable[Path], peer: PeerId, ring: bool, rounds: Mapping[int, int] = MappingProxyType({})
) -> tuple[Item, ...]:
    """A peer's part of the paths, in their order."""
    items: list[Item] = []
    for path in paths:
        peers = [hop.peer for hop in path.hops]
        if peer in peers:
            place, last = peers.index(peer), len(peers) - 1
            source = peers[place - 1] if place or ring else None  # an origin's source is the last relay: index -1
            target = peers[place + 1] if place < last else peers[0] if ring else None
            after, m = None if place else path.after, path.microbatch
            items.append(Item(m, place, last, source, target, after, rounds.get(m, 0)))
    return tuple(items)


def mix_of(lead: Lead, situation: Situation, peer: PeerId, stage: int) -> Mix:
    """With whom a peer agrees on its stage's gradient."""
    tie_to, tie_from = lead.roster.tie(peer, stage) if lead.job.config.tied else ((), None)
    group = lead.roster.holders(stage)
    streams = situation.streams.get(stage, ()) if peer == group[0] else ()
    return Mix(
        group=group,
        visitors=situation.plan.visitors(stage),
        attempt=situation.attempts.get(stage, 0),
        tie_to=tie_to,
        tie_from=tie_from,
        streams=tuple(stream for stream in streams if stream.peer in lead.roster.members),
    )


def outstanding(lead: Lead, situation: Situation, answers: Mapping[PeerId, Prepared]) -> list[PeerId]:
    """Who has not said yet that all is prepared, by the latest state of affairs."""
    return [
        peer
        for peer, stage in lead.roster.seated()
        if peer not in answers or answers[peer].attempt != situation.attempts.get(stage, 0)
    ]


async def mend(lead: Lead, situation: Situation, repair: Repair, step: int) -> Situation:
    """Take stock, decide, tell everybody.

    Raises:
        PeersLost: the step has to be done again: a stage is empty, the policy says so, or more peers were lost
            meanwhile (then it may be called again).
    """
    plan, progress = situation.plan, None
    await lead.succession.seal()  # before anybody is replaced: this lead itself may be what is cut off
    while progress is None:
        situation = msgspec.structs.replace(situation, stocktakings=situation.stocktakings + 1)
        lost = lost_on_paths(lead, plan)
        if not all(lead.roster.holders(stage) for stage in range(lead.num_stages)):
            raise PeersLost(lead.roster.lost)
        try:
            progress = await _take_stock(lead, lost, situation.stocktakings, step)
        except Stalled:
            raise
        except PeersLost:
            continue  # once more, without them
    view = lead.view(len(plan.paths))
    mending = repair(Wound(plan=plan, lost=lost, view=view, progress=progress))
    if mending is None:
        raise PeersLost(lead.roster.lost)
    validate(mending.plan, view)
    return await _tell(lead, situation, mending, step)


def lost_on_paths(lead: Lead, plan: StepPlan) -> frozenset[PeerId]:
    """Peers that the paths lead through and that are no longer there."""
    involved = {hop.peer for path in plan.paths for hop in path.hops}
    return frozenset(peer for peer in involved if peer not in lead.roster.members)


async def _take_stock(lead: Lead, lost: frozenset[PeerId], count: int, step: int) -> dict[PeerId, Progress]:
    seated = [peer for peer, _ in lead.roster.seated()]
    for peer in seated:
        await lead.tell(peer, "census", Census(tuple(sorted(lost)), count), step)
    standings = await lead.gather(f"standing/{count}", seated, Standing, step)
    return {peer: Progress(frozenset(s.done), frozenset(s.arrived)) for peer, s in standings.items()}


async def _tell(lead: Lead, situation: Situation, mending: Mending, step: int) -> Situation:
    plan, last = mending.plan, lead.num_stages - 1
    lead.states.note(RUN, "drained")
    lead.states.note(RUN, "mend")
    names, lead.lost_at = lead.replace_lost(), None
    hurt = {lead.roster.home[name] for name in names if name in lead.roster.home}
    if mending.restarted:  # every stage computes them again, those too that were already mixing
        hurt = set(range(lead.num_stages))
    if lead.job.config.tied and not plan.ring and hurt & {0, last}:
        hurt |= {0, last}  # both ends of a tied embedding mix again
    attempts = dict(situation.attempts)
    for stage in hurt:
        attempts[stage] = situation.stocktakings
    rounds = {**situation.rounds, **dict.fromkeys(mending.restarted, situation.stocktakings)}
    situation = Situation(plan, attempts, situation.stocktakings, rounds, situation.streams)
    lead.record(
        "train.mend",
        Mended(
            lost=names,
            repaired=len(mending.repaired),
            skipped=len(mending.skipped),
            restarted=len(mending.restarted),
            repeated=mending.repeated,
        ),
        step=step,
    )
    for peer, stage in lead.roster.seated():
        items = items_of(plan.paths, peer, plan.ring, rounds)
        await lead.tell(peer, "amend", Amend(items=items, mix=mix_of(lead, situation, peer, stage)), step)
    return situation


__all__ = ["Situation", "mend", "mix_of", "outstanding", "repairs", "share_of"]
