"""Giving peers their stages' states, and other peers what they keep of them: who sends what to whom."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from talkoot.core.ids import PeerId
from talkoot.run.greeting import Contact, Introduce
from talkoot.train.compute import gradient_bytes
from talkoot.train.keeping import whoever_holds
from talkoot.train.messages import Assign, Donor, Give, Keep, Ready, Update, Visit
from talkoot.train.records import Committed, Seated
from talkoot.train.recovery import Holding, Loss, Source

if TYPE_CHECKING:
    from talkoot.train.lead import Lead


def loss_of(lead: Lead) -> Loss:
    """What is left, for the ladder."""
    config, roster = lead.job.config, lead.roster
    ends, norms = {0, config.layer_count - 1}, lead.state["train"].norms
    stages: list[Holding] = []
    for stage, (first, last) in enumerate(lead.stages):
        held = set(config.held(first, last))
        stages.append(
            Holding(
                survivors=roster.holders(stage),
                keepers=tuple(lead.keepers.able(stage, lead.step)),
                blocks=len(held - ends),
                ends=bool(held & ends),
                approximated=lead.state["train"].blended.get(stage) == lead.step,
                gradient_norm=norms[stage] if norms else 1.0,
            )
        )
    homes = {roster.home[name] for name in lead.hurt if name in roster.home}
    empty = {stage for stage, held in enumerate(stages) if not held.survivors}
    return Loss(
        stages=tuple(stages),
        hurt=tuple(sorted(homes | empty)),
        step=lead.step,
        checkpoint=lead.state["train"].checkpoint,
        logged=_why_not_logged(lead, empty),
        ring=lead.recipe.swarm.layout == "ring",
        exact_moments=lead.recipe.recovery.moments == "exact",
        failed=frozenset(lead.failed),
    )


def _why_not_logged(lead: Lead, empty: set[int]) -> str:
    """Why lost steps cannot be computed again from what was sent; empty when they can."""
    since = lead.saved_at or 0
    if "replay" not in lead.recipe.recovery.ladder:
        return "nobody remembers what was sent"
    late = [
        member.name for member in lead.roster.members.values() if member.stage is not None and member.seated > since
    ]
    if late:
        return f"{', '.join(sorted(late))} came after the snapshot of step {since} and lacks what was sent before"
    there = lead.roster.members.keys()
    gone = [s for s, peers in lead.served.items() if s not in empty and peers - there - lead.repeated.get(s, set())]
    if gone:
        return f"what peers of stages {sorted(gone)} had sent since the snapshot of step {since} is gone with them"
    made = [stage for stage, at in lead.state["train"].blended.items() if at > since and stage in empty]
    if made:
        return f"stages {sorted(made)} were approximated after the snapshot of step {since}"
    tied = lead.job.config.tied and lead.recipe.swarm.layout == "line" and lead.num_stages > 1
    if tied and empty & {0, lead.num_stages - 1}:
        return "the gradient that ties its embedding to the other end is not remembered"
    return ""


async def seat(lead: Lead, vacant: Sequence[tuple[PeerId, int]], sources: dict[int, Source]) -> None:
    """Give each peer its stage's state: from a holder where there is one, else as its source says, else stored.

    Raises:
        PeersLost: somebody went away meanwhile.
    """
    await introduce(lead)
    words: dict[PeerId, str] = {}
    received: set[PeerId] = set()  # whose state comes from other peers
    again = {stage for stage, source in sources.items() if source.how == "replay"}
    for peer, stage in vacant:
        others = tuple((other_stage, other) for other, other_stage in vacant if other_stage in again - {stage})
        assign, gives, words[peer] = _plan(lead, peer, stage, sources.get(stage), others)
        received |= {peer} if gives else set()
        lead.states.note(lead.roster.name_of(peer), "assign")
        await lead.tell(peer, "assign", assign, lead.step)
        for donor, give in gives:
            await lead.tell(donor, "give", give, lead.step)
    answers = await lead.gather("ready", words, Ready, lead.step)
    for peer, stage in vacant:  # all of them before anybody has a seat: what a stage is made of must not be forgotten
        lead.states.note(lead.roster.name_of(peer), "ready")
        if answers[peer].stage != stage or (peer in received and not answers[peer].finite):
            if stage in sources and answers[peer].stage == stage:  # whoever's fault it was: another way next time
                lead.failed.add((stage, sources[stage].rung))
            why = f": {answers[peer].problem}" if answers[peer].problem else ""
            lead.expel(peer, f"it does not hold a usable state of stage {stage}{why}")
    for peer, stage in vacant:
        member = lead.roster.members[peer]
        lead.states.note(member.name, "accept")
        member.stage, member.held = stage, True
        member.seated = (
            (lead.saved_at or 0) if stage in again else lead.step
        )  # it remembers what it sent in those steps
        if stage in again:
            lead.repeated.setdefault(stage, set()).update(lead.served.get(stage, set()) - lead.roster.members.keys())
        lead.served.setdefault(stage, set()).add(peer)
        lead.record("peer.seat", Seated(peer=peer, name=member.name, stage=stage, source=words[peer]))


async def introduce(lead: Lead) -> None:
    """Tell everybody where everybody is."""
    contacts = tuple(Contact(peer, member.address) for peer, member in lead.roster.members.items())
    for peer in lead.roster.members:
        others = tuple(contact for contact in contacts if contact.peer != peer)
        await lead.tell(peer, "introduce", Introduce(others), lead.step)
    lead.strangers = False


def _plan(
    lead: Lead, peer: PeerId, stage: int, source: Source | None, companions: tuple[tuple[int, str], ...]
) -> tuple[Assign, list[tuple[PeerId, Give]], str]:
    """What the newcomer is told, what its donors are told, and in words where its state comes from."""
    first, last = lead.stages[stage]
    blobs = lead.blobs_of(stage)
    holders = lead.roster.holders(stage)
    if holders:
        how, donors, words = "copy", [Donor(holders[-1])], "replica"
        gives = [(holders[-1], Give(to=peer))]
    elif source is None or source.how in ("rollback", "copy"):
        how, donors, gives, words = "stored", [], [], f"snapshot of step {lead.step}" if blobs else "start"
    elif source.how == "kept" and source.keeper is not None:
        how, donors, words = "journal", [Donor(source.keeper)], f"{source.rung} at {lead.roster.name_of(source.keeper)}"
        gives = [(source.keeper, Give(to=peer, what="kept", stage=stage))]
    elif source.how == "replay":
        how, words = "replay", f"snapshot of step {lead.saved_at or 0} and what its neighbours had sent"
        others = [other for other, _ in lead.roster.seated()]
        were = (whoever_holds(stage), *sorted(lead.served.get(stage, ())))
        donors = [Donor(other) for other in others]
        gives = [(other, Give(to=peer, what="sent", were=were, since=lead.saved_at or 0)) for other in others]
    else:
        how, words = "blend", "blend of stages " + " and ".join(str(share.stage) for share in source.shares)
        donors = [Donor(share.peer, *lead.stages[share.stage], share.norm) for share in source.shares]
        kinds = ("weight", "second") if lead.recipe.recovery.moments == "neighbours" else ("weight",)
        gives = [(share.peer, Give(to=peer, what="weights", kinds=kinds)) for share in source.shares]
        if source.keeper is not None:
            donors.append(Donor(source.keeper, first, last))
            gives.append((source.keeper, Give(to=peer, what="kept", stage=stage)))
    since = {"journal": _base(lead, stage, source), "replay": lead.saved_at or 0}.get(how, lead.step)
    assign = Assign(
        stage=stage,
        num_stages=lead.num_stages,
        first=first,
        last=last,
        step=lead.step,
        reached=lead.furthest,
        source=how,
        donors=tuple(donors),
        blobs=blobs if how in ("stored", "replay") else (),
        companions=companions if how == "replay" else (),
        updates=updates(lead, stage, since),
    )
    return assign, gives, words


def _base(lead: Lead, stage: int, source: Source | None) -> int:
    return lead.step if source is None or source.keeper is None else lead.keepers.base(stage, source.keeper)


def updates(lead: Lead, stage: int, since: int) -> tuple[Update, ...]:
    """How the committed steps from ``since`` on were applied to a stage, from the log."""
    found: dict[int, Update] = {}
    if since >= lead.step:
        return ()
    for entry in lead.journal.entries():
        if entry.receipt.op == "train.commit" and since <= entry.receipt.step < lead.step:
            facts = entry.receipt.read(Committed)
            rate = facts.learning_rate * dict(facts.bumps).get(stage, 1.0)
            scale = scale_of(lead.recipe.train.clip, facts.gradient_norm)
            visits = tuple(_visits(facts.ways(lead.num_stages), stage, lead.recipe.swarm.layout == "ring"))
            found[entry.receipt.step] = Update(rate, scale, visits)
    return tuple(found[step] for step in range(since, lead.step))


def _visits(ways: Sequence[Sequence[int]], stage: int, ring: bool) -> Iterator[Visit]:
    for microbatch, way in enumerate(ways):
        if stage in way:
            place, last = way.index(stage), len(way) - 1
            before = way[place - 1] if place or ring else -1  # an origin's is the last relay
            after = way[place + 1] if place < last else way[0] if ring else -1
            yield Visit(microbatch, before, after)


def scale_of(clip: float, norm: float) -> float:
    """The factor that brings a gradient of this norm down to ``clip``; 0 = no limit."""
    return clip / norm if clip and norm > clip and math.isfinite(norm) else 1.0


async def arrange_keepers(lead: Lead) -> None:
    """Ask peers to keep what is not kept yet, between two steps; the run does not wait for them."""
    stored = (lead.saved_at or 0) == lead.step
    view = lead.view(lead.recipe.train.microbatches)
    sizes = gradient_bytes(lead.job.config, lead.stages, lead.recipe.recovery.stream)
    for stage, peer in lead.keepers.wanted(view, lead.generation, sizes):
        owner = lead.roster.holders(stage)[0]
        lead.keepers.add(stage, peer, lead.generation)
        first, last = lead.stages[stage]
        keep = Keep(
            kind="shadow" if lead.keepers.kind == "shadow" else "journal",
            stage=stage,
            first=first,
            last=last,
            step=lead.step,
            owner=None if stored else owner,
            blobs=lead.blobs_of(stage) if stored else (),
        )
        await lead.tell(peer, "keep", keep, lead.step)
        if not stored:
            await lead.tell(owner, "give", Give(to=peer, what="base"), lead.step)
    for stage, peer in lead.keepers.stale(lead.step):
        await lead.tell(lead.roster.holders(stage)[0], "give", Give(to=peer, what="base"), lead.step)
