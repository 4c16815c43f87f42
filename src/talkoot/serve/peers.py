"""The peers' table of the view."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from talkoot.core.ids import short
from talkoot.serve.series import tidy
from talkoot.serve.words import clean, name_of
from talkoot.train.records import Worked

STATES = ("present", "left", "lost")
MAX_PEERS = 256  # remembered; the longest lost are forgotten first
MAX_LANES = 32  # drawn
MAX_STAYS = 12  # intervals of presence remembered per peer


@dataclass(slots=True)
class Peer:
    """What is known of one peer; ``here`` are its intervals of presence (an open one ends with None)."""

    id: str
    name: str
    stage: int | None = None
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
            rows.append({**facts, **sums, "speed": tidy(self.speeds.get(peer.name))})
        present = sum(peer.present for peer in self._peers.values())
        return {"rows": rows, "present": present, "joined": self.joined, "lost": self.lost}


def _stage(peer: Peer) -> float:
    return math.inf if peer.stage is None else peer.stage
