"""Peers as a recipe of a run without stages names them, and the misfortune that it plans for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from talkoot.core.errors import TalkootError, nearest
from talkoot.core.plain import CORRECT
from talkoot.run.section import Rule, Section, peer_names
from talkoot.world.faults import Fault

MOST_PEERS = 256
_PLAIN = 'without blanks and slashes, not only dots; "lead" is taken'


class PeerEntry(Section, frozen=True, kw_only=True):
    """One peer, or several alike.

    Attributes:
        name: empty = a tree's.
        speed: of its processor in a rehearsal, 1 = unhindered.
        count: so many peers like this one; their names are numbered.
    """

    KEY = "peers"
    name: str = ""
    speed: float = 1.0
    count: int = 1

    def rules(self) -> Iterable[Rule]:
        yield "speed", 0 < self.speed <= 1, "in (0, 1], 1 = unhindered"
        yield "count", 1 <= self.count <= MOST_PEERS, f"from 1 to {MOST_PEERS}"
        bare = self.name == "".join(self.name.split()) and self.name.isprintable() and not set(self.name) & set("/\\")
        yield "name", not self.name or bool(bare and self.name != "lead" and self.name.strip(".")), _PLAIN


P = TypeVar("P", bound=PeerEntry)


def named(peers: Sequence[P]) -> dict[str, P]:
    """Every peer by its name, in the recipe's order; those without one get trees that nobody else has.

    Raises:
        TalkootError: none or too many, or two of one name.
    """
    total = sum(peer.count for peer in peers)  # before anybody gets a name
    if not 1 <= total <= MOST_PEERS:
        raise _bad("peers", f"it is {total}, it must be 1 to {MOST_PEERS} peers")
    each = [(peer, number) for peer in peers for number in range(peer.count)]
    given = [f"{p.name}{number + 1}" if p.name and p.count > 1 else p.name for p, number in each]
    spare = (name for name in peer_names(2 * len(given)) if name not in given)
    found: dict[str, P] = {}
    for name, (peer, _) in zip((name or next(spare) for name in given), each, strict=True):
        if name in found:
            raise _bad("peers", f"two peers are called {name!r}")
        found[name] = peer
    return found


def check_faults(faults: Sequence[Fault], names: Sequence[str], phases: Sequence[str]) -> None:
    """Refuse faults of peers that there are not, or at points that no work has.

    Raises:
        TalkootError: naming the fault and the nearest name that exists.
    """
    for index, fault in enumerate(faults):
        for name in fault.victims:
            if name not in names:
                raise _bad(f"faults[{index}].peer", f"there is no peer {name!r}; {nearest(name, names)}")
        if fault.at_s is None and (fault.step is None or fault.phase not in phases):
            raise _bad(f"faults[{index}].phase", f"there is no phase {fault.phase!r}; {nearest(fault.phase, phases)}")


def _bad(where: str, why: str) -> TalkootError:
    return TalkootError("the recipe cannot be used", where=where, why=why, next=CORRECT)
