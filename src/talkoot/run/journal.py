"""The lead's pen: signs its own receipts, checks other peers', and keeps log and folded state in step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar

from talkoot.core.fold import Entry, State, fold
from talkoot.core.ids import Digest
from talkoot.core.log import Log
from talkoot.core.receipt import Receipt, Signed, Task, body, sign
from talkoot.run.records import Facts
from talkoot.world.api import World

Observer = Callable[[Entry, State], None]


def unobserved(entry: Entry, state: State) -> None:
    """An observer that ignores everything."""


# Who watches the log: set where a run begins, found again by a standby that takes over in the same process.
OBSERVER: ContextVar[Observer] = ContextVar("observer", default=unobserved)


class Journal:
    """A run's log, opened for writing.

    Args:
        world: whose key signs and whose clock stamps.
        log: what it holds is continued.
        seed: the run's, stated in each task.
        observer: called with each new entry and the state after it.
    """

    def __init__(self, world: World, log: Log, seed: int, observer: Observer) -> None:
        self._world, self._log, self._seed, self._observer = world, log, seed, observer
        self.state: State = fold(log.entries())

    def record(self, op: str, facts: Facts, generation: int, step: int, parents: tuple[str, ...] = ()) -> None:
        """Sign a receipt of one's own and append it."""
        world, now = self._world, self._world.now()
        receipt = Receipt(
            run=world.run,
            generation=generation,
            step=step,
            peer=world.me,
            task=Task(op=op, seed=self._seed),
            body=body(facts),
            started=now,
            ended=now,
            parents=parents,
        )
        self.append(sign(receipt, world.key))

    def append(self, signed: Signed) -> Digest:
        """Append a receipt after checking its signature; returns its id. ValueError when it is not acceptable."""
        self._log.full = self._world.blobs.full  # they lie on one disk
        entry, self.state = self._log.append(signed, self.state)
        self._observer(entry, self.state)
        return entry.id

    def entries(self) -> Iterator[Entry]:
        """All entries, from the first."""
        return self._log.entries()

    def signed(self, first: int) -> Iterator[Signed]:
        """What the log's file holds from entry ``first`` on, unchecked; somebody else may have written there too."""
        return self._log.signed(first)

    def chain_at(self, position: int) -> Digest:
        """The hash chain up to an entry."""
        return self._log.chain_at(position)

    def sync(self) -> None:
        """Let what was appended survive a power cut."""
        self._log.sync()
