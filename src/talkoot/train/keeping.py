"""What a peer keeps so that another one can be brought back: states, gradients, and what it sent. No conversation.

*Shadow*: a stage's weights and moments, to which every gradient that its owner streams is applied as well; after a
commit it has the owner's very bits. *Journal*: a state of the stage as its owner once sent it, and the gradients since,
on disk. *Sent log*: the activations and gradients that this peer sent to its neighbours; with a stored state, a lost
neighbour's steps are computed again from them. (Logging at stage boundaries: Zhong et al., 2023, "Swift",
arXiv 2302.06173; a state in a neighbour's memory: Wang et al., 2023, "Gemini".)
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from talkoot.core.errors import TalkootError
from talkoot.plan.steps import Phase
from talkoot.train.compute import StageCompute
from talkoot.train.desk import Parcel
from talkoot.train.messages import Update
from talkoot.world.api import Blank, Frame, frame_bytes

IN_MEMORY_BYTES = 2**20  # frames larger than that go to disk
MAX_WAITING = 16  # gradients of one stage by one sender that are not applied yet


class Laid(NamedTuple):
    """Frames that were laid aside: themselves, or where in the file they are."""

    frames: Sequence[Frame]
    offset: int = 0
    sizes: tuple[int, ...] = ()


class Spool:
    """Frames laid aside, in one file without a name when they are large; it goes with the process."""

    def __init__(self) -> None:
        self._file = None
        self._end = 0

    def put(self, frames: Sequence[Frame]) -> Laid:
        """Lay frames aside.

        Raises:
            TalkootError: the disk does not take them.
        """
        sizes = tuple(map(frame_bytes, frames))
        if sum(sizes) <= IN_MEMORY_BYTES or any(isinstance(frame, Blank) for frame in frames):
            return Laid(list(frames))
        offset = self._end
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 it lives as long as this object
                weakref.finalize(self, self._file.close)
            self._file.seek(offset)
            for frame in frames:
                self._file.write(frame)  # type: ignore[arg-type]
            self._file.flush()
        except OSError as problem:
            raise TalkootError(
                "what is needed for recovery cannot be kept",
                where=tempfile.gettempdir(),
                why=str(problem),
                next="make space, set TMPDIR to a larger disk, or take 'journal' and 'replay' off recovery.ladder",
            ) from problem
        self._end += sum(sizes)
        return Laid((), offset, sizes)

    def get(self, laid: Laid) -> list[Frame]:
        """The frames as they were."""
        if self._file is None or not laid.sizes:
            return list(laid.frames)
        self._file.seek(laid.offset)
        return [self._file.read(size) for size in laid.sizes]

    def clear(self) -> None:
        """Nothing that was laid aside is needed any more."""
        self._end = 0
        if self._file is not None:
            self._file.truncate(0)


class HandOver(NamedTuple):
    """What a newcomer needs: a state of ``step``, and the gradients of the steps since."""

    step: int
    state: Sequence[Frame]
    gradients: Sequence[Sequence[Frame]]


class Kept(Protocol):
    """What is kept of one stage. Gradients and commits may come in any order and before the state does."""

    step: int  # of the steps that can be brought back; behind the commits while something is still on its way
    base: int  # the step of the state that is kept as it came

    def begin(self, state: Sequence[Frame], step: int) -> None:
        """Take the stage's state of ``step``; what was kept before is of no more use.

        Raises:
            ValueError: it does not fit the stage.
        """
        ...

    def commit(self, step: int, update: Update, frames: Sequence[Frame]) -> None:
        """The step whose gradient these frames are was applied by the owner in this way."""
        ...

    def hand_over(self) -> HandOver:
        """Everything that a newcomer needs for the state of :attr:`step`."""
        ...


class Shadow:
    """A :class:`Kept` that is always as far as its owner.

    Args:
        stage: of the owner's layers, empty.
    """

    def __init__(self, stage: StageCompute) -> None:
        self._stage, self.base, self.step = stage, -1, -1

    def begin(self, state: Sequence[Frame], step: int) -> None:
        try:
            if state or step:  # else it is the one that a fresh stage has
                self._stage.load([joined(state)], step)
        except TalkootError as problem:
            raise ValueError(f"{problem.where}: {problem.why}") from problem
        self.base = self.step = step

    def commit(self, step: int, update: Update, frames: Sequence[Frame]) -> None:
        self._stage.begin(step, 1, False)
        self._stage.adopt(frames)
        self._stage.apply(update.learning_rate, update.scale)
        self.step = step + 1

    def hand_over(self) -> HandOver:
        return HandOver(self.step, self._stage.pack(), ())


class Journal:
    """A :class:`Kept` that costs no memory and no arithmetic until it is needed."""

    def __init__(self) -> None:
        self.step, self.base, self._spool = -1, -1, Spool()
        self._state, self._gradients = Laid(()), list[Laid]()

    def begin(self, state: Sequence[Frame], step: int) -> None:
        self.step = -1  # should the disk not take it
        self._spool.clear()
        self._state, self._gradients, self.base, self.step = self._spool.put(state), [], step, step

    def commit(self, step: int, update: Update, frames: Sequence[Frame]) -> None:
        self._gradients.append(self._spool.put(frames))
        self.step = step + 1

    def hand_over(self) -> HandOver:
        get = self._spool.get
        return HandOver(self.base, get(self._state), [get(laid) for laid in self._gradients])


class Streamed(NamedTuple):
    """Which gradient a commit means: of which step, by whom, and in which of the attempts at it."""

    step: int
    owner: str
    generation: int
    attempt: int


class Keeping:
    """One stage that a peer keeps, and what has arrived for it.

    A gradient is answered only when everything before it is here: whoever waits for the answer relies on that.

    Args:
        kept: a shadow or a journal.
        gradient_bytes: size of a gradient of the stage; others are not taken.
        flops: of a commit.
        owner: who may send the stage's state; later it is whoever streamed the last committed gradient.
        generation: in which it was asked for; an older one's states belong to a past that was given up.
    """

    def __init__(
        self, kept: Kept, gradient_bytes: int, flops: float = 0.0, owner: str | None = None, generation: int = 0
    ) -> None:
        self.kept, self._gradient_bytes, self.flops = kept, gradient_bytes, flops
        self._owner, self._generation = owner, generation
        self._gradients: dict[Streamed, Sequence[Frame]] = {}
        self._answered: set[Streamed] = set()
        self._commits: dict[int, tuple[Streamed, Update]] = {}  # by step, those not carried out yet

    def begin(self, state: Sequence[Frame], step: int) -> None:
        """Take a state, and do what waited for it."""
        self.kept.begin(state, step)
        self._advance()

    def renew(self, sender: str, generation: int, state: Sequence[Frame], step: int) -> bool:
        """As :meth:`begin`, if it is the owner's word and not older than what is here; whether it is.

        Raises:
            ValueError: it does not fit the stage.
        """
        if sender != self._owner or generation < self._generation or step < self.kept.step:
            return False
        self.begin(state, step)
        return True

    def gradient(self, which: Streamed, frames: Sequence[Frame]) -> bool:
        """Take a gradient; False when it cannot be one of this stage. Of too many, a sender's first one goes."""
        if len(frames) != 1 or frame_bytes(frames[0]) != self._gradient_bytes:
            return False
        if which.step >= self.kept.step:  # else it was applied, or is part of the state
            self._gradients[which] = frames
            waiting = [other for other in self._gradients if other.owner == which.owner]
            for first in waiting[:-MAX_WAITING]:
                del self._gradients[first]
            self._advance()
        return True

    def commit(self, which: Streamed, update: Update) -> None:
        """Note a commit; what else was prepared in this step is forgotten."""
        self._commits[which.step], self._owner = (which, update), which.owner
        for other in [other for other in self._gradients if other.step == which.step and other != which]:
            del self._gradients[other]
        self._advance()

    def answers(self) -> list[Streamed]:
        """Gradients with which all is here that their step needs; each is named once."""
        ready = [which for which in self._gradients if which.step == self.kept.step and which not in self._answered]
        self._answered.update(ready)
        return ready

    @property
    def torn(self) -> bool:
        """Whether something was lost on its way: later gradients are here, but not what comes before them.

        An owner's state comes before its first gradient; a new owner's gradient may overtake it, which costs a state.
        """
        later = any(which.step > self.kept.step for which in self._gradients)
        return later and (self.kept.step < 0 or self.kept.step in self._commits)

    def _advance(self) -> None:
        while (due := self._commits.get(self.kept.step)) is not None and due[0] in self._gradients:
            which, update = due
            self.kept.commit(which.step, update, self._gradients.pop(which))
        for which in [which for which in self._gradients if which.step < self.kept.step]:
            del self._gradients[which]
        self._answered &= self._gradients.keys()
        self._commits = {step: due for step, due in self._commits.items() if step >= self.kept.step}


class SentLog:
    """What this peer sent in committed steps, to whom, for which work of theirs."""

    def __init__(self) -> None:
        self._steps: dict[int, tuple[list[tuple[str, Phase, int, int]], Laid]] = {}
        self._spool = Spool()

    def note(self, step: int, parcels: Iterable[Parcel], since: int) -> None:
        """Remember the parcels of a committed step; those of steps before ``since`` are forgotten."""
        for old in [old for old in self._steps if old < since]:
            del self._steps[old]
        if not self._steps:
            self._spool.clear()
        keys: list[tuple[str, Phase, int, int]] = []
        frames: list[Frame] = []
        for parcel in parcels:
            keys.append((parcel.to, parcel.phase, parcel.microbatch, len(parcel.frames)))
            frames += parcel.frames
        self._steps[step] = keys, self._spool.put(frames)

    def of(self, step: int, to: frozenset[str]) -> list[tuple[Phase, int, Sequence[Frame]]]:
        """(phase, microbatch, frames) of everything that was sent to these peers in a step."""
        found: list[tuple[Phase, int, Sequence[Frame]]] = []
        if step not in self._steps:
            return found
        keys, laid = self._steps[step]
        frames, at = self._spool.get(laid), 0
        for peer, phase, microbatch, count in keys:
            if peer in to:
                found.append((phase, microbatch, frames[at : at + count]))
            at += count
        return found


def whoever_holds(stage: int) -> str:
    """In a log of what was sent, the receiver of what was only computed again: no peer is called like that."""
    return f"stage {stage}"


def joined(frames: Sequence[Frame]) -> bytes:
    """The bytes of all frames; nothing for those of a rehearsal."""
    return b"".join(bytes(frame) for frame in frames if not isinstance(frame, Blank))
