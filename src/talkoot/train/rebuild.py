"""How a newcomer comes by its stage's state: stored, copied, or worked out from what others kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from talkoot.core.errors import TalkootError
from talkoot.core.ids import PeerId
from talkoot.plan.steps import Phase
from talkoot.train.compute import UPDATE_FLOPS, Neighbour, StageCompute, hop_bytes
from talkoot.train.desk import Parcel
from talkoot.train.keeping import joined, whoever_holds
from talkoot.train.messages import Assign, Donor, Sent, Update, Visit
from talkoot.train.worker import Worker
from talkoot.world.api import Frame, Message, frame_bytes

Arrived = dict[int, dict[tuple[Phase, int], Sequence[Frame]]]  # by step, and work that it was sent for


class Unusable(Exception):
    """What others sent makes no sense; nothing can be made of it here."""


@contextmanager
def _from(donor: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, IndexError, TalkootError) as problem:
        why = f"{problem.where}: {problem.why}" if isinstance(problem, TalkootError) else str(problem)
        raise Unusable(f"peer {donor[:8]} sent what does not fit: {why}") from problem


async def rebuild(worker: Worker, assign: Assign, stage: StageCompute) -> None:
    """Bring a fresh stage to the state of ``assign.step``.

    Raises:
        Unusable: what a donor sent does not fit.
        TalkootError: what is stored does not.
    """
    match assign.source:
        case "stored":
            if assign.blobs:
                stage.load([worker.world.blobs.get(name) for name in assign.blobs], assign.step)
        case "copy" | "journal":
            await _from_keeper(worker, assign, stage)
        case "replay":
            await _again(worker, assign, stage)
        case "blend":
            await _blended(worker, assign, stage)


async def _from_keeper(worker: Worker, assign: Assign, stage: StageCompute) -> None:
    donor, oldest = assign.donors[0].peer, assign.step - len(assign.updates)
    message = await worker.take_from(donor, f"state/{worker.generation}")
    if not oldest <= message.step <= assign.step:
        raise Unusable(f"peer {donor[:8]} sent the state of step {message.step}, not of {oldest} to {assign.step}")
    if message.frames or message.step:  # else it is the one that a fresh stage has
        with _from(donor):
            stage.load([joined(message.frames)], message.step)
    for step in range(message.step, assign.step):
        gradient = await worker.take_from(donor, f"journal/{worker.generation}")
        if gradient.step != step:
            raise Unusable(f"peer {donor[:8]} sent the gradient of step {gradient.step}, not of {step}")
        stage.begin(step, 1, False)
        with _from(donor):
            stage.adopt(gradient.frames)
        await _apply(worker, stage, assign.updates[step - assign.step])


async def _apply(worker: Worker, stage: StageCompute, update: Update) -> None:
    apply = partial(stage.apply, update.learning_rate, update.scale)
    await worker.world.compute(apply, UPDATE_FLOPS * stage.num_values)
    worker.work_done += 1


async def _again(worker: Worker, assign: Assign, stage: StageCompute) -> None:
    base = assign.step - len(assign.updates)
    if assign.blobs:
        stage.load([worker.world.blobs.get(name) for name in assign.blobs], base)
    arrived = await _collect(worker, {donor.peer for donor in assign.donors}, base, assign.step)
    again = _Again(worker, assign, stage, arrived)
    for step, update in enumerate(assign.updates, base):
        stage.begin(step, worker.job.recipe.train.microbatches, False, [visit.microbatch for visit in update.visits])
        for visit in update.visits:  # in the same order everywhere: nobody waits for somebody who waits for it
            await again.visit(step, visit)
        arrived.pop(step, None)
        worker.sent.note(step, again.take_sent(), base)  # as good as what the lost peer remembered
        stage.finish()
        await _apply(worker, stage, update)


class _Again:
    """One stage's part in computing steps again; what it had sent to other lost stages, it sends again."""

    def __init__(self, worker: Worker, assign: Assign, stage: StageCompute, arrived: Arrived) -> None:
        self._worker, self._assign, self._stage, self._arrived = worker, assign, stage, arrived
        self._sent: list[Parcel] = []

    async def visit(self, step: int, visit: Visit) -> None:
        """Do everything that this stage had to do for a microbatch."""
        stage, m = self._stage, visit.microbatch
        origin = bool(stage.loss_flops)  # of a ring: it opens and closes the path
        opens = origin or visit.before < 0
        given = () if opens else await self._input(step, "forward", m)
        output = await self._work(partial(stage.forward, m, given), stage.forward_flops)
        closes = not origin and visit.after == 0  # the last relay of a ring
        await self._pass_on(step, "loss" if closes else "forward", m, visit.after, output)
        if origin:
            output = await self._work(partial(stage.loss, m, await self._input(step, "loss", m)), stage.loss_flops)
            await self._pass_on(step, "backward", m, visit.before, output)
        given = () if visit.after < 0 else await self._input(step, "backward", m)
        output = await self._work(partial(stage.backward, m, given), 2 * stage.forward_flops)
        if not origin:
            await self._pass_on(step, "backward", m, visit.before, output)

    async def _input(self, step: int, phase: Phase, microbatch: int) -> Sequence[Frame]:
        """What a neighbour had sent for this work, or sends again now."""
        topic, companions = f"again/{self._worker.generation}", {peer for _, peer in self._assign.companions}
        while (phase, microbatch) not in self._arrived[step]:
            message = await self._worker.listen(topic)
            if message.sender in companions:
                for key, frame in _sent_frames(self._worker, message).items():
                    self._arrived[message.step].setdefault(key, [frame])
        return self._arrived[step][phase, microbatch]

    async def _pass_on(self, step: int, phase: Phase, microbatch: int, to: int, output: Sequence[Frame]) -> None:
        if to >= 0:
            self._sent.append(Parcel(whoever_holds(to), phase, microbatch, 0, output))
        for stage, peer in self._assign.companions:
            if stage == to:
                sent = Sent(((phase, microbatch),))
                await self._worker.send(PeerId(peer), f"again/{self._worker.generation}", sent, output, step)

    def take_sent(self) -> list[Parcel]:
        """What was sent, or would have been, since the last call."""
        sent, self._sent = self._sent, []
        return sent

    async def _work(self, work: partial[Sequence[Frame]], flops: float) -> Sequence[Frame]:
        output = await self._worker.world.compute(work, flops)
        self._worker.work_done += 1
        return output


async def _collect(worker: Worker, donors: set[str], first: int, end: int) -> Arrived:
    """What the neighbours sent in the steps from ``first`` to ``end``; each says when a step is complete."""
    arrived: Arrived = defaultdict(dict)
    missing = {(donor, step) for donor in donors for step in range(first, end)}
    while missing:
        message = await worker.listen(f"sent/{worker.generation}")
        if (message.sender, message.step) not in missing:
            continue
        for key, frame in _sent_frames(worker, message).items():
            arrived[message.step][key] = [frame]
        if not message.read(Sent).more:
            missing.discard((message.sender, message.step))
    return arrived


def _sent_frames(worker: Worker, message: Message) -> dict[tuple[Phase, int], Frame]:
    """The frames of a ``sent`` or ``again`` by the work that they are for; each is as large as an activation."""
    with _from(message.sender):
        keys, size = message.read(Sent).keys, hop_bytes(worker.job.config, worker.job.recipe)
        if any(frame_bytes(frame) != size for frame in message.frames):
            raise ValueError(f"frames of {sorted(set(map(frame_bytes, message.frames)))} bytes, not of {size}")
        return dict(zip(keys, message.frames, strict=True))


async def _blended(worker: Worker, assign: Assign, stage: StageCompute) -> None:
    waiting = list(assign.donors)
    arrived: dict[Donor, bytes] = {}
    while waiting:
        message = await worker.listen(f"state/{worker.generation}")
        donor = next((donor for donor in waiting if donor.peer == message.sender), None)
        if donor is not None:  # one that sends twice does it in the order in which it was asked
            waiting.remove(donor)
            arrived[donor] = joined(message.frames)
    neighbours = [Neighbour(donor.first, donor.last, donor.norm, arrived[donor]) for donor in assign.donors]
    with _from("of a neighbouring stage"):
        stage.blend(neighbours, assign.step)
