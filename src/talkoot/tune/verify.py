"""What a post-training run's log proves about it, from the receipts alone.

The log itself proves who signed what, and in which order (:meth:`~talkoot.core.log.Log.entries`). Here is what honest
peers cannot get wrong: whose completions an update says it learned from, that policies follow from one another, and
that no round is left out or done twice. Whether a reward was earned is for the receivers, who work it out themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from talkoot.core.fold import Entry, State, advance
from talkoot.core.log import Log
from talkoot.core.receipt import Receipt
from talkoot.run.records import Gone, Joined, Start
from talkoot.tune.records import Generated, Updated, Viewed

Findings = Iterator[str]


@dataclass(slots=True)
class _Life:
    """One start of a peer: a key of its own, from its hello until it is gone."""

    name: str
    rounds: int | None = None  # the round that is next, once it has done one
    policy: str = ""  # after its newest update
    used: set[str] = field(default_factory=set)  # others' records that it learned from


@dataclass(frozen=True, slots=True)
class _Made:
    """A ``tune.generate``: whose, of which round, with which weights."""

    peer: str
    round: int
    policy: str


@dataclass(frozen=True, slots=True)
class _Cited:
    """An update's word for having learned from somebody's record."""

    position: int
    who: str
    peer: str
    round: int
    parent: str


def verify(path: Path) -> list[str]:
    """What is wrong with a run's log, in words; empty = nothing that its receipts could tell.

    Raises:
        TalkootError: the log is missing, or a signature, a column or the hash chain does not hold.
    """
    log = Log(path, readonly=True)
    try:
        return examine(log.entries())
    finally:
        log.close()


def examine(entries: Iterable[Entry]) -> list[str]:
    """The same for entries whose signatures and chain hold."""
    audit, state, found = _Audit(), State(), list[str]()
    for entry in entries:
        try:
            found += audit.see(entry)
            state = advance(state, entry)
        except ValueError as problem:  # what follows it would be judged by a state that nobody has
            return [*found, f"receipt {entry.position}: {entry.receipt.op} cannot follow what was before: {problem}"]
    return [*found, *audit.close()]


class _Audit:
    """Looks at one receipt after the other; what needs the whole log waits until the end."""

    def __init__(self) -> None:
        self._lag = 0
        self._lives: dict[str, _Life] = {}  # by identity, of this session
        self._since: dict[str, int] = {}  # by name, as the newest view has it
        self._made: dict[str, _Made] = {}  # by receipt
        self._cited: list[_Cited] = []
        self._broken_off = 0  # lives that ended in the middle of a round, maybe
        self._ended = False

    def see(self, entry: Entry) -> Findings:
        """What is wrong with one more receipt."""
        receipt = entry.receipt
        match receipt.op:
            case "run.start":
                self._lag = _lag(receipt.read(Start).recipe)
            case "run.resume":
                self._broken_off += 0 if self._ended else len(self._lives)
                self._lives, self._since, self._ended = {}, {}, False
            case "run.end":
                self._ended = True
            case "peer.join":
                facts = receipt.read(Joined)
                self._lives[facts.peer] = _Life(facts.name)
            case "peer.lost":
                self._broken_off += self._lives.pop(receipt.read(Gone).peer, None) is not None
            case "tune.view":
                self._since = dict(receipt.read(Viewed).places)
            case "tune.generate":
                yield from self._generate(entry, receipt.read(Generated))
            case "tune.update":
                yield from self._update(entry, receipt.read(Updated))

    def close(self) -> Findings:
        """What is wrong with citations, now that every record is known.

        A peer that was lost may have sent a record to the others and not to the lead: so many may be missing.
        """
        missing: dict[str, _Cited] = {}
        for one in self._cited:
            made = self._made.get(one.parent)
            where = f"receipt {one.position}: {one.who}'s update of round {one.round}"
            if made is None:
                missing.setdefault(one.parent, one)
            elif made.peer == one.peer:
                yield f"{where} cites a second record of its own"
            elif abs(made.round - one.round) > self._lag:
                yield f"{where} cites a record of round {made.round}, more than {self._lag} rounds away"
        excused = self._broken_off + (0 if self._ended else len(self._lives))
        if len(missing) > excused:
            first = min(missing.values(), key=lambda one: one.position)
            yield (
                f"receipt {first.position}: {len(missing)} cited records are not in the log, and only {excused} peers "
                f"broke off; the first one is {first.parent[:12]}, cited by {first.who} in round {first.round}"
            )

    def _generate(self, entry: Entry, facts: Generated) -> Findings:
        receipt, life = entry.receipt, self._lives.get(entry.receipt.peer)
        where = f"receipt {entry.position}: {life.name if life else receipt.peer[:8]}'s completions"
        self._made[entry.id] = _Made(receipt.peer, facts.round, facts.policy)
        if life is None:
            yield f"{where} come from somebody who is not there"
            return
        if receipt.task.inputs.get("policy") != facts.policy:
            yield f"{where} name two policies that they were made with"
        if receipt.step != facts.round:
            yield f"{where} are of round {facts.round}, but stand at round {receipt.step}"
        if life.policy and facts.policy != life.policy:
            yield f"{where} of round {facts.round} were not made with the policy that its last update left"

    def _update(self, entry: Entry, facts: Updated) -> Findings:
        receipt, life = entry.receipt, self._lives.get(entry.receipt.peer)
        if life is None:
            yield f"receipt {entry.position}: an update by {receipt.peer[:8]}, who is not there"
            return
        where = f"receipt {entry.position}: {life.name}'s update of round {facts.round}"
        yield from (f"{where} {problem}" for problem in self._own(receipt, facts, life))
        if life.name not in self._since:
            yield f"{where}: it is in no view"
        else:
            due = max(life.rounds or 0, self._since[life.name])
            if facts.round != due:
                yield f"{where}: round {due} was next"
        life.rounds, life.policy = facts.round + 1, facts.policy
        for parent in receipt.parents[1:]:
            if parent in life.used:
                yield f"{where} learns from a record that it learned from before"
            life.used.add(parent)
            self._cited.append(_Cited(entry.position, life.name, receipt.peer, facts.round, parent))

    def _own(self, receipt: Receipt, facts: Updated, life: _Life) -> Findings:
        """What is wrong with an update beside its own completions."""
        facts.check()
        made = self._made.get(receipt.parents[0]) if receipt.parents else None
        if receipt.outputs.get("policy") != facts.policy:
            yield "names two policies that came out of it"
        if made is None or (made.peer, made.round) != (receipt.peer, facts.round):
            yield "does not begin with its own completions of that round"
        elif receipt.task.inputs.get("policy") != made.policy:
            yield "began from another policy than its completions were made with"
        if facts.solo and len(receipt.parents) > 1:
            yield "calls itself alone and cites others"


def _lag(recipe: dict[str, object]) -> int:
    """How many rounds a cited record may be away."""
    exchange = recipe.get("exchange", {})
    lag = exchange.get("max_lag", 0) if isinstance(exchange, dict) else 0
    return lag if isinstance(lag, int) and lag >= 0 else 0
