"""The peers' table of the view."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from talkoot.core.ids import short
from talkoot.core.receipt import Receipt
from talkoot.serve.series import tidy
from talkoot.serve.words import clean, name_of
from talkoot.train.records import Worked
from talkoot.train.rounds.records import Rounded, Viewed

STATES = ("present", "left", "lost")
MAX_PEERS = 256  # remembered; the longest lost are forgotten first
MAX_LANES = 32  # drawn
MAX_STAYS = 12  # intervals of presence remembered per peer


@dataclass(slots=True)
class Peer:
    """What is known of one peer; ``here`` are its intervals of presence (an open one ends with None).

    A replica of a run in rounds has a ``slot``, its share of the data; of its newest report, ``until`` is the end.
    """

    id: str
    name: str
    stage: int | None = None
    slot: int | None = None
    steps_per_round: int | None = None
    rounds: int = 0
    tokens: int = 0
    wait_s: float = 0.0
    held_out: float | None = None
    until: float = -math.inf
    state: str = "present"  # or "lost", or "left" when the lead stopped
    microbatches: int = 0
    busy_s: float = 0.0
    sent_bytes: int = 0
    here: list[tuple[float, float | None]] = field(default_factory=list)

    @property
    def present(self) -> bool:
        """Whether the peer is there now."""
        return self.state == "present"


class Peers:
    """All peers that ever joined, up to a bound."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}
        self.speeds: Mapping[str, float] = {}
        self.joined = self.lost = 0

    def join(self, peer_id: str, name: str, now: float) -> list[str]:
        """A peer said hello; returns the peers forgotten to make room."""
        self.joined += 1
        known = self._peers.get(peer_id)
        if known is None:
            known = self._peers[peer_id] = Peer(peer_id, name_of(name))
        known.name, known.state = name_of(name), "present"
        if not known.here or known.here[-1][1] is not None:
            known.here = [*known.here[1 - MAX_STAYS :], (now, None)]
        lost = [peer.id for peer in self._peers.values() if not peer.present]
        surplus = lost[: max(len(self._peers) - MAX_PEERS, 0)]
        for peer in surplus:
            del self._peers[peer]
        return surplus

    def seat(self, peer_id: str, stage: int) -> None:
        """A peer holds a stage."""
        if peer_id in self._peers:
            self._peers[peer_id].stage = stage

    def lose(self, peer_id: str, now: float) -> None:
        """A peer is gone."""
        self.lost += 1
        self._leave(peer_id, now, "lost")

    def all_leave(self, now: float) -> None:
        """The lead stopped or started: no peer outlives it."""
        for peer_id in self._peers:
            self._leave(peer_id, now, "left")

    def _leave(self, peer_id: str, now: float, state: str) -> None:
        peer = self._peers.get(peer_id)
        if peer is not None and peer.present:
            peer.state = state
            peer.here[-1] = (peer.here[-1][0], now)

    def credit(self, peer_id: str, facts: Worked) -> None:
        """A peer's account of its part of a step."""
        peer = self._peers.get(peer_id)
        if peer is not None:
            peer.microbatches += len(facts.microbatches)
            peer.busy_s += facts.busy_s if math.isfinite(facts.busy_s) else 0.0
            peer.sent_bytes += facts.sent_bytes

    def place(self, view: Viewed | None) -> None:
        """Who is in the run, each with a slot."""
        places = dict(zip(view.names, zip(view.slots, view.steps, strict=False), strict=False)) if view else {}
        for peer in self._peers.values():
            if peer.present and peer.name in places:
                peer.slot, peer.steps_per_round = places[peer.name]

    def credit_round(self, receipt: Receipt, facts: Rounded) -> float | None:
        """A replica's account of a round; when the work in it began that no earlier account covers."""
        peer = self._peers.get(receipt.peer)
        if peer is None:
            return None
        peer.rounds, peer.tokens, peer.sent_bytes = (
            peer.rounds + 1,
            peer.tokens + facts.tokens,
            peer.sent_bytes + facts.sent_bytes,
        )
        peer.busy_s += facts.busy_s if math.isfinite(facts.busy_s) else 0.0
        peer.wait_s += facts.wait_s if math.isfinite(facts.wait_s) else 0.0
        peer.held_out = peer.held_out if facts.held_out is None else facts.held_out
        start, peer.until = max(receipt.started, peer.until), max(receipt.ended, peer.until)
        return start

    def credit_work(self, receipt: Receipt, busy_s: float, sent_bytes: int) -> float | None:
        """A stretch of work in post-training; when the work in it began that no earlier account covers."""
        peer = self._peers.get(receipt.peer)
        if peer is None:
            return None
        peer.busy_s += busy_s if math.isfinite(busy_s) else 0.0
        peer.sent_bytes += sent_bytes
        start, peer.until = max(receipt.started, peer.until), max(receipt.ended, peer.until)
        return start

    def knows(self, peer_id: str) -> bool:
        """Whether this peer joined."""
        return peer_id in self._peers

    def ordered(self) -> list[Peer]:
        """Present ones first, by stage, in the order in which they joined."""
        return sorted(self._peers.values(), key=lambda peer: (STATES.index(peer.state), _stage(peer)))

    def lanes(self) -> list[Peer]:
        """The peers worth a lane in the timeline: by stage, a lost one beside its replacement."""
        chosen = {peer.id for peer in self.ordered()[:MAX_LANES]}
        return sorted((p for p in self._peers.values() if p.id in chosen), key=_stage)

    def table(self, now: float) -> dict[str, Any]:
        """The table as plain data."""
        rows = []
        for peer in self.ordered():
            stayed = sum((now if end is None else end) - start for start, end in peer.here)
            busy = min(max(peer.busy_s / stayed, 0.0), 1.0) if stayed > 0 else None
            facts = {"name": peer.name, "id": clean(short(peer.id)), "stage": peer.stage, "state": peer.state}
            sums = {"microbatches": peer.microbatches, "busy": tidy(busy), "sent_bytes": peer.sent_bytes}
            if peer.slot is not None:
                sums |= about_rounds(peer)
            rows.append({**facts, **sums, "slot": peer.slot, "speed": tidy(self.speeds.get(peer.name))})
        present = sum(peer.present for peer in self._peers.values())
        return {"rows": rows, "present": present, "joined": self.joined, "lost": self.lost}


def about_rounds(peer: Peer) -> dict[str, Any]:
    """What the table says of a replica besides; its speed is in tokens per second of computing."""
    spent = peer.wait_s + peer.busy_s
    return {
        "rounds": peer.rounds,
        "steps_per_round": peer.steps_per_round,
        "waiting": tidy(peer.wait_s / spent) if spent > 0 else None,
        "tokens_per_s": tidy(peer.tokens / peer.busy_s) if peer.busy_s > 0 else None,
        "held_out": tidy(peer.held_out),
    }


def _stage(peer: Peer) -> float:
    place = peer.stage if peer.slot is None else peer.slot
    return math.inf if place is None else place
