"""A peer's desk during one step: what it has to do, what has arrived, what it may do next, what it sent. No I/O.

Everything that a crash elsewhere may ask for again is kept until the step is over: the outputs sent forward and the
gradients sent back. Each piece of work is done once however often its input arrives, so resending is always safe.
When a neighbour on a path is replaced, whatever was sent to the old one is sent again to the new one: the newcomer
recomputes its own stage alone, and both its neighbours recognise what they have already had. (Crash repair on both
ways: Blagoev et al., 2025, "GWTF", arXiv 2509.21221.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from talkoot.plan.steps import Phase, Work
from talkoot.train.messages import Item
from talkoot.world.api import Frame

Key = tuple[Phase, int]


class Parcel(NamedTuple):
    """Something to send: to whom, for which work of theirs, and the frames."""

    to: str
    phase: Phase
    microbatch: int
    round: int
    frames: Sequence[Frame]


class Desk:
    """See the module's text.

    Args:
        me: whose desk.
        items: this peer's share of the paths, in the order in which the step launches them.
        order: the order of work, where the plan prescribes one.
        ring: whether paths return to their origin for the loss.
        slots: microbatches that may be between forward and backward here; 0 = any number.
        forward_only: an evaluation.
    """

    def __init__(
        self,
        me: str,
        items: Iterable[Item],
        order: Sequence[Work] = (),
        *,
        ring: bool = False,
        slots: int = 0,
        forward_only: bool = False,
    ) -> None:
        self.me, self.ring, self.slots, self.forward_only = me, ring, slots, forward_only
        self.items = {item.microbatch: item for item in items}
        self._order, self._rank = list(order), {m: rank for rank, m in enumerate(self.items)}
        self._inputs: dict[Key, Sequence[Frame]] = {}
        self._strays: dict[tuple[str, Phase, int, int], Sequence[Frame]] = {}  # of paths not known to lead here yet
        self._senders: dict[Key, set[str | None]] = {}
        self._sent: dict[Key, Sequence[Frame]] = {}
        self._deaf: set[str] = set()
        self._extra: set[int] = set()  # taken over from a lost peer: they may exceed the slots
        self.done: set[Key] = set()
        self.counts = {"forward": 0, "loss": 0, "backward": 0}  # how often each kind of work was done
        for item in self.items.values():
            self._expect(item)
        self._needed = sum(len(self._phases(item)) for item in self.items.values())

    def _phases(self, item: Item) -> tuple[Phase, ...]:
        closing: tuple[Phase, ...] = ("loss",) if self.ring and item.position == 0 else ()
        return ("forward", *closing) if self.forward_only else ("forward", *closing, "backward")

    def _expect(self, item: Item) -> None:
        """Note from whom an item's inputs may come; whoever held the place before keeps the right to be heard."""
        m, opens = item.microbatch, item.position == 0
        sources: dict[Phase, str | None] = {"forward": None if opens else item.source, "backward": item.target}
        if self.ring and opens:
            sources["loss"] = item.source
        for phase, sender in sources.items():
            key: Key = (phase, m)
            self._senders.setdefault(key, set()).add(sender)
            early = self._strays.pop((sender or "", phase, m, item.round), None)
            if early is not None and key not in self.done:
                self._inputs.setdefault(key, early)

    # -- arrivals --------------------------------------------------------------------------------------------

    def arrive(self, sender: str, phase: Phase, microbatch: int, frames: Sequence[Frame], round: int = 0) -> None:
        """Take in a neighbour's message; what was had before, or belongs to an earlier round, is dropped.

        News of new paths may come later than what is sent along them: that is kept aside.
        """
        key: Key = (phase, microbatch)
        item = self.items.get(microbatch)
        if sender in self._deaf or (item is not None and round < item.round):
            return
        if item is not None and round == item.round and sender in self._senders.get(key, ()):
            if key not in self.done:
                self._inputs.setdefault(key, frames)
        elif len(self._strays) < 4096:
            self._strays[sender, phase, microbatch, round] = frames

    # -- work ------------------------------------------------------------------------------------------------

    def next(self) -> Work | None:
        """What to do now; None when everything that is left waits for somebody."""
        if self._order:
            first = self._order[0]
            return first if self._ready(first.phase, self.items[first.microbatch]) else None
        choices: list[tuple[bool, int, int, Phase, int]] = []
        held = sum(("forward", m) in self.done and ("backward", m) not in self.done for m in self.items)
        full = bool(self.slots) and held >= self.slots and not self.forward_only
        for m, item in self.items.items():
            for phase in self._phases(item):
                if (phase, m) in self.done:
                    continue
                if self._ready(phase, item) and not (phase == "forward" and full and m not in self._extra):
                    to_go = {"forward": 2 * item.length - item.position, "loss": item.length}
                    choices.append((phase == "forward", -to_go.get(phase, item.position), self._rank[m], phase, m))
                break  # an item's phases follow each other
        return Work(min(choices)[3], min(choices)[4]) if choices else None

    def _ready(self, phase: Phase, item: Item) -> bool:
        m = item.microbatch
        if phase == "forward" and item.position == 0:
            return item.after is None or self.forward_only or ("backward", item.after) in self.done
        if phase == "backward" and item.target is None:
            return ("forward", m) in self.done  # the end of a line keeps its own loss
        return (phase, m) in self._inputs and (phase == "forward" or ("forward", m) in self.done)

    def inputs(self, work: Work) -> Sequence[Frame]:
        """The frames that a piece of work takes."""
        return self._inputs.get((work.phase, work.microbatch), ())

    def finish(self, work: Work, output: Sequence[Frame]) -> Parcel | None:
        """Note that it is done; returns what has to be sent, if anything."""
        key = (work.phase, work.microbatch)
        if self._order:
            self._order.pop(0)
        self._inputs.pop(key, None)
        self.done.add(key)
        self.counts[work.phase] += 1
        self._sent[key] = output
        return self._parcel(key)

    def _parcel(self, key: Key) -> Parcel | None:
        phase, m = key
        item = self.items[m]
        if phase == "forward":
            to, theirs = item.target, "loss" if self.ring and item.position == item.length else "forward"
        else:  # the loss's gradient goes to the last relay, a relay's to whom its input came from
            to, theirs = item.source, "backward"
            if (phase == "loss" and self.forward_only) or (phase == "backward" and item.position == 0):
                to = None
        return Parcel(to, theirs, m, item.round, self._sent[key]) if to is not None else None

    def parcels(self) -> list[Parcel]:
        """Everything that was sent in this step, as it had to be sent last."""
        return [parcel for key in sorted(self._sent) if (parcel := self._parcel(key)) is not None]

    @property
    def finished(self) -> bool:
        """Whether everything on this desk is done."""
        return len(self.done) == self._needed

    # -- after a crash elsewhere -----------------------------------------------------------------------------

    def take_stock(self, lost: Iterable[str]) -> tuple[tuple[Key, ...], tuple[int, ...]]:
        """What is done, and what could be; from here on nothing that a lost peer said is heard."""
        self._deaf.update(lost)
        arrived = sorted(m for phase, m in self._inputs if phase != "backward")
        return tuple(sorted(self.done)), tuple(arrived)

    def amend(self, items: Sequence[Item]) -> list[Parcel]:
        """Take the paths as they are now; returns what has to be sent again.

        A microbatch whose round is another one starts again from its origin.
        """
        before, self.items = self.items, {item.microbatch: item for item in items}
        self._order.clear()  # it was made for other paths
        again_from_start = {m for m, item in self.items.items() if m in before and before[m].round != item.round}
        for m in again_from_start | (before.keys() - self.items.keys()):
            for kind in (self._inputs, self._sent, self._senders):
                for key in [key for key in kind if key[1] == m]:
                    del kind[key]
            self.done = {key for key in self.done if key[1] != m}
        self._needed = sum(len(self._phases(item)) for item in self.items.values())
        again: list[Parcel] = []
        for m, item in self.items.items():
            old = before.get(m)
            self._rank.setdefault(m, len(self._rank))
            if old is None:
                self._extra.add(m)
            self._expect(item)
            if old is None or m in again_from_start:
                continue
            moved: dict[Phase, bool] = {"forward": item.target != old.target, "loss": item.source != old.source}
            moved["backward"] = moved["loss"]
            sent: list[Key] = [(phase, m) for phase in self._phases(item) if moved[phase] and (phase, m) in self.done]
            again += [parcel for parcel in map(self._parcel, sent) if parcel is not None]
        return again
