"""Two replicas swap one message each, and both merge, or neither does.

One trip is all that a swap costs. Whoever has the partner's message merges it at once and says ``took``; the next inner
steps begin while that word travels. Where it does not come (the partner was late, or is gone, or could not use what it
got), the merge is taken back, into a step alone, and what was learned since stays. Of all failures only one leaves a
merge on one side: the last word is lost although both are well. It is bounded, zero on average, and counted.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import TYPE_CHECKING

from talkoot.core.ids import PeerId
from talkoot.train.rounds.messages import Key, Offer, Place, Refused, Took
from talkoot.train.rounds.replica import Apart, Unmergeable

if TYPE_CHECKING:
    from talkoot.train.rounds.trainer import Trainer

LEAST_S = 2.5  # as long as a link takes to notice that nothing comes any more
FIRST_S = 10.0  # before anything is known about partners
WORD_S = 5.0  # for the word that a message was taken
SPREADS = 8.0  # how many usual deviations late is too late


class Waits:
    """How long to wait for a partner: the usual wait, and some of its usual deviations (median and MAD)."""

    def __init__(self, fixed_s: float | None) -> None:
        self._fixed_s = fixed_s
        self._seen: deque[float] = deque(maxlen=32)

    def note(self, seconds: float) -> None:
        """A partner came after so long."""
        self._seen.append(seconds)

    def limit_s(self, round_s: float) -> float:
        """The longest wait that is worth it; ``round_s``: how long one's own last round took."""
        if self._fixed_s is not None:
            return self._fixed_s
        if len(self._seen) < 5:
            return max(FIRST_S, 2 * round_s)
        middle = statistics.median(self._seen)
        spread = statistics.median(abs(wait - middle) for wait in self._seen)
        return max(LEAST_S, round_s / 4, middle + SPREADS * 1.4826 * spread)


class Swap:
    """One exchange with a partner; without one (None) it is a step alone.

    Attributes:
        why: why nothing was merged, if so.
        settled: it is over, and its outcome stands.
    """

    def __init__(self, peer: Trainer, key: Key, partner: Place | None, weight: float) -> None:
        self._peer, self.key, self._place, self._weight = peer, key, partner, weight
        self.name, self._partner = (partner.name, PeerId(partner.peer)) if partner else ("", None)
        self._at = (key.round, key.fragment)
        self.why, self.settled, self.one_sided = "", False, False
        self.apart: Apart | None = None
        self.merged = self._took = False
        self._until = 0.0

    async def begin(self) -> None:
        """Send one's own message."""
        peer = self._peer
        frames = await peer.crunch(lambda: peer.replica.message(self._at, self._weight), peer.replica.num_values)
        if self._place is None or self._partner is None:
            self.why = "odd"
        elif not peer.reaches(self._place):
            self.why = "gone"
        else:
            for key, sender in peer.mail.stale(*self._at, self.key.view):
                await peer.send(sender, "refused", Refused(key, "another view"))
            await peer.send(self._partner, "offer", Offer(self.key), frames)

    def awaits(self, sender: PeerId) -> bool:
        """Whether an offer of that replica can still be merged."""
        return self._partner == sender and not self.why and not self.merged

    def _gone(self) -> bool:
        return self._partner in self._peer.mail.gone

    async def merge(self) -> None:
        """Take in the partner's message, as soon as it is there, or go on alone."""
        peer, partner = self._peer, self._partner
        if self.why or partner is None:
            await self._alone(self.why)
            return
        started, offer, refused, took = peer.world.now(), None, None, None

        def heard() -> bool:
            nonlocal offer, refused, took
            offer = offer or peer.mail.take(self.key, "offer", partner)
            refused = refused or peer.mail.take(self.key, "refused", partner)
            took = took or peer.mail.take(self.key, "took", partner)
            return bool(offer or refused or took or self._gone())

        await peer.wait(heard, peer.patience.limit_s(peer.round_s))
        if offer is None or refused is not None:
            lost = "lost" if took else "late"  # messages keep their order: who has taken mine has sent its own
            await self._alone("gone" if self._gone() else refused.read(Refused).why if refused else lost)
            return
        self._took = took is not None
        peer.patience.note(peer.world.now() - started)
        frames = offer.frames
        try:
            self.apart = await peer.crunch(lambda: peer.replica.merge(self._at, frames), peer.replica.num_values)
        except Unmergeable as problem:
            await self._alone(str(problem))
            return
        # One's own message may be larger, or its link slower: as long as for the partner's, at least.
        self.merged, self._until = True, peer.world.now() + max(WORD_S, peer.patience.limit_s(peer.round_s))
        await peer.send(partner, "took", Took(self.key))

    async def _alone(self, why: str) -> None:
        peer = self._peer
        self.why, self.settled = why, True
        if self._partner is not None and not self._gone():
            await peer.send(self._partner, "refused", Refused(self.key, why))
        await peer.crunch(lambda: peer.replica.merge(self._at, None), peer.replica.num_values)
        peer.replica.settle(self._at)

    async def settle(self, *, wait: bool) -> None:
        """Hear whether the partner took one's own message, if it has said so; with ``wait``, until that is clear."""
        peer, partner = self._peer, self._partner
        if self.settled or partner is None:
            return
        took, refused = self._took, None

        def heard() -> bool:
            nonlocal took, refused
            took = took or peer.mail.take(self.key, "took", partner) is not None
            refused = refused or peer.mail.take(self.key, "refused", partner)
            return took or refused is not None or self._gone()

        if wait:
            await peer.wait(heard, self._until - peer.world.now())
        done = heard() or peer.world.now() >= self._until
        if refused is not None or (done and not took):
            self.why = "gone" if self._gone() else (refused.read(Refused).why if refused else "no word")
            self.one_sided, self.merged = not refused and not self._gone(), False
            peer.replica.take_back(self._at)
            self.settled = True
            if not self._gone():
                await peer.send(partner, "refused", Refused(self.key, self.why))
        elif took:
            peer.replica.settle(self._at)
            self.settled = True
