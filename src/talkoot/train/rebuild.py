"""How a newcomer comes by its stage's state: stored, copied, or worked out from what others kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from talkoot.plan.steps import Phase
from talkoot.train.compute import Neighbour, StageCompute
from talkoot.train.keeping import joined
from talkoot.train.messages import Assign, Donor, Sent, Update
from talkoot.train.worker import Worker
from talkoot.world.api import Frame

Arrived = dict[int, dict[tuple[Phase, int], Sequence[Frame]]]  # by step, and work that it was sent for
UPDATE_FLOPS = 12.0  # per parameter, of one optimizer step


async def rebuild(worker: Worker, assign: Assign, stage: StageCompute) -> None:
    """Bring a fresh stage to the state of ``assign.step``.

    Raises:
        ValueError: what a donor sent is of another step than the lead said.
        TalkootError: it does not fit the stage.
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
    donor = assign.donors[0].peer
    message = await worker.take_from(donor, f"state/{worker.generation}")
    if message.frames:
        stage.load([joined(message.frames)], message.step)
    for step in range(message.step, assign.step):
        gradient = await worker.take_from(donor, f"journal/{worker.generation}")
        if gradient.step != step:
            raise ValueError(f"the gradient of step {step} was expected, that of {gradient.step} came")
        stage.begin(step, 1, False)
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
    for step, update in enumerate(assign.updates, base):
        inputs = arrived.pop(step)
        stage.begin(step, worker.job.recipe.train.microbatches, False, update.visitors)
        for m in update.visitors:
            await _work(worker, partial(stage.forward, m, inputs.get(("forward", m), ())), stage.forward_flops)
            if stage.loss_flops:
                await _work(worker, partial(stage.loss, m, inputs["loss", m]), stage.loss_flops)
            await _work(worker, partial(stage.backward, m, inputs.get(("backward", m), ())), 2 * stage.forward_flops)
        stage.finish()
        await _apply(worker, stage, update)


async def _work(worker: Worker, work: partial[Sequence[Frame]], flops: float) -> None:
    await worker.world.compute(work, flops)
    worker.work_done += 1


async def _collect(worker: Worker, donors: set[str], first: int, end: int) -> Arrived:
    """What the neighbours sent in the steps from ``first`` to ``end``; each says when a step is complete."""
    arrived: Arrived = defaultdict(dict)
    missing = {(donor, step) for donor in donors for step in range(first, end)}
    while missing:
        message = await worker.listen(f"sent/{worker.generation}")
        if (message.sender, message.step) not in missing:
            continue
        sent = message.read(Sent)
        if len(sent.keys) != len(message.frames):
            raise ValueError(f"{message} names {len(sent.keys)} frames and carries {len(message.frames)}")
        for key, frame in zip(sent.keys, message.frames, strict=True):
            arrived[message.step][key] = [frame]
        if not sent.more:
            missing.discard((message.sender, message.step))
    return arrived


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
    stage.blend(neighbours, assign.step)
