"""Which lead a peer obeys, and how that changes; the rule behind it is in :mod:`talkoot.train.succession`."""

from __future__ import annotations

from talkoot.core.ids import PeerId
from talkoot.train.messages import Heir, Orphan
from talkoot.world.api import Message, World

TOPICS = ("heir", "dismiss", "claim")
SUPERSEDED = "superseded"


class Allegiance:
    """One peer's; ``lead`` is the one that it obeys, or obeyed last.

    Args:
        world: the peer's own; it has a lead.
        orphan_s: how long to do without one. A standby that is gone itself is noticed at once; this is for one that
            is there and has no reason to lead.
    """

    def __init__(self, world: World, orphan_s: float) -> None:
        if world.lead is None:
            raise ValueError("a training peer needs a lead")
        self._world, self._orphan_s, self.lead = world, orphan_s, world.lead
        self._former: PeerId | None = None
        self._heir: PeerId | None = None
        self._orphaned = False

    @property
    def patience_s(self) -> float | None:
        """How long to wait for the next message; None = for ever."""
        return self._orphan_s if self._orphaned else None

    async def lost(self, peer: PeerId, generation: int) -> bool:
        """Take the loss of a link; whether there is still somebody to work for.

        From its word to the standby on, a peer does nothing that the lost lead says: this is what makes two majorities
        exclude each other.
        """
        if peer == self._heir:
            self._heir = None
            return not self._orphaned
        if peer == self.lead and self._heir is not None:
            self._orphaned = True
            await self._world.send(self._heir, "orphan", Orphan(generation), generation=generation)
        return peer != self.lead or self._heir is not None

    def concerns(self, peer: PeerId) -> bool:
        """Whether the loss of ``peer`` is this module's matter alone."""
        return peer in (self.lead, self._heir, self._former)

    async def obeys(self, message: Message) -> bool:
        """Whether a message is the lead's; one of a lead that was left is answered with ``superseded``."""
        if message.sender == self._former:
            await self._world.send(message.sender, SUPERSEDED)
        return message.sender == self.lead and not self._orphaned

    def accepts(self, claim: Message, generation: int) -> bool:
        """Whether a standby's claim to lead is right: the old lead was lost here too, and the generation is new."""
        if not self._orphaned or claim.sender != self._heir or claim.generation <= generation:
            return False
        self._former, self.lead, self._heir, self._orphaned = self.lead, claim.sender, None, False
        self._world.follow(claim.sender)
        return True

    async def hear(self, message: Message) -> None:
        """Take the lead's word about its standby: ``heir`` or ``dismiss``."""
        heir = message.read(Heir)
        if message.topic == "heir":
            self._heir = PeerId(heir.peer)
            self._world.meet(self._heir, heir.address)
            return
        if self._heir == heir.peer:
            self._heir = None
        await self._world.send(message.sender, "dismissed", heir, generation=message.generation, step=message.step)
