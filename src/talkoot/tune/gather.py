"""What others sent: records kept until their round is due, and who is still waited for.

Bounded: one record per peer and round, of the rounds right around the present one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from talkoot.core.ids import PeerId, RunId
from talkoot.tune.messages import Rollouts
from talkoot.tune.wire import Limits, Record, Refused, unpack
from talkoot.world.api import Message

AHEAD = 4  # rounds that somebody may be ahead and still be listened to


class Inbox:
    """See the module's text.

    Attributes:
        rejected: records that were refused since the last :meth:`take`, by reason.
        gone: peers whose link broke, until they are met again.
    """

    def __init__(self, run: RunId, limits: Limits) -> None:
        self._run, self._limits = run, limits
        self._kept: dict[tuple[int, PeerId], Record] = {}
        self._seen: dict[PeerId, int] = {}  # the newest round used of each: a replay brings nothing
        self._heard: dict[PeerId, int] = {}  # the newest round that each sent anything for, good or not
        self._refused: dict[PeerId, int] = {}  # the newest round whose record was refused
        self.rejected: Counter[str] = Counter()
        self.gone: set[PeerId] = set()

    def put(self, message: Message, round_number: int, lag: int, members: Collection[PeerId]) -> None:
        """Take in a ``rollouts`` message; what is wrong with it is counted."""
        try:
            if message.sender not in members:
                raise Refused("of a stranger", message.sender[:8])
            self._heard[message.sender] = max(self._heard.get(message.sender, -1), message.step)
            try:
                signed = message.read(Rollouts).signed
            except ValueError as problem:
                raise Refused("bad signature or form", str(problem)) from problem
            record = unpack(signed, message.frames, message.sender, self._run, self._limits)
            number = record.facts.round
            if number <= self._seen.get(message.sender, -1) or (number, message.sender) in self._kept:
                raise Refused("replayed", f"round {number} of this peer was there before")
            if number < round_number - lag:
                raise Refused("of another round", f"round {number}, this is {round_number}")
        except Refused as problem:
            self.rejected[problem.reason] += 1
            self._refused[message.sender] = message.step
            return
        if number > round_number + max(AHEAD, lag):
            return  # nothing is wrong with it, but who runs away is not followed for ever
        self._kept[number, message.sender] = record
        for key in sorted(key for key in self._kept if key[1] == message.sender)[: -AHEAD - 1]:
            del self._kept[key]

    def missing(self, round_number: int, expected: Collection[PeerId]) -> list[PeerId]:
        """Who is expected, has a link, and has sent nothing for this round or a later one. (Whose record was refused is
        not waited for: it would hold up everybody.)"""
        silent = [peer for peer in expected if self._heard.get(peer, -1) < round_number]
        return [peer for peer in silent if peer not in self.gone]

    def heard_of(self, peer: PeerId, round_number: int) -> bool:
        """Whether something of this peer came for the round and could not be used, or something newer was used."""
        return self._refused.get(peer) == round_number or self._seen.get(peer, -1) >= round_number

    def take(self, round_number: int, lag: int) -> list[Record]:
        """The newest record of each peer that is at most ``lag`` rounds away; it and older ones are forgotten."""
        newest: dict[PeerId, Record] = {}
        for number, peer in sorted(self._kept):
            if abs(number - round_number) <= lag:
                newest[peer] = self._kept[number, peer]
        self._seen |= {peer: record.facts.round for peer, record in newest.items()}
        self._kept = {key: record for key, record in self._kept.items() if key[0] > self._seen.get(key[1], -1)}
        return list(newest.values())
