"""The training job on one page. Read this first.

A step is a transaction: *begin* (a plan is proposed), *compute* (peers run their microbatches and *mix* their
gradients), *commit* (the step enters the log, then everybody applies it). A peer lost before the commit costs nothing
but the time: the same microbatches are issued again under a new generation. A peer lost after it finds all survivors
at the same step. What the methods behind begin, mix and recover are is the recipe's choice, by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import msgspec

from talkoot.core.errors import Exit, TalkootError
from talkoot.core.fold import State
from talkoot.core.ids import PeerId
from talkoot.plan import StepPlan, planners, validate
from talkoot.train.crew import PeersLost, Stalled
from talkoot.train.lead import Lead
from talkoot.train.mend import Situation, mend, outstanding, repairs, share_of
from talkoot.train.messages import Commit, Prepared
from talkoot.train.records import Committed, Evaluated, Worked
from talkoot.train.routing import refresh_routes
from talkoot.train.saving import save_snapshot
from talkoot.train.schedule import learning_rate
from talkoot.train.seating import scale_of
from talkoot.train.succession import Superseded


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished (or interrupted) run has to show.

    Attributes:
        already: it was finished before, and nothing was done.
        approximate: (stage, step) of stages that nobody had any more and that were made of others.
    """

    finished: bool
    step: int
    loss: float | None
    held_out: float | None
    state_hash: str
    log_hash: str
    already: bool = False
    approximate: tuple[tuple[int, int], ...] = ()


def result_of(state: State, steps: int, *, already: bool = False) -> Result:
    """What a run in this state has to show."""
    train, run = state["train"], state["run"]
    return Result(
        finished=train.step >= steps and run.ended == "done",
        step=train.step,
        loss=train.loss,
        held_out=train.held_out,
        state_hash=run.state_hash,
        log_hash=state.chain,
        already=already,
        approximate=tuple(sorted(train.blended.items())),
    )


async def train(lead: Lead) -> Result:
    """Run the job from wherever the log says it is to its last step."""
    lead.assemble()
    return await conduct(lead)


async def conduct(lead: Lead) -> Result:
    """Lead from here to the end, whatever kind of end it is, and write it down.

    Raises:
        Superseded: this lead may not go on, and its peers are not its own any more.
        TalkootError: the run cannot go on.
    """
    try:
        await run_steps(lead)
    except Superseded:
        raise
    except TalkootError as problem:
        if (overtaken := lead.succession.overtaken()) is not None:
            raise overtaken from problem
        with suppress(TalkootError):  # the log itself may be what cannot be written
            lead.end(problem.what)
        await lead.succession.close()
        raise
    await lead.finish()
    return result_of(lead.state, lead.recipe.train.steps)


async def run_steps(lead: Lead) -> None:
    """Step after step, each a transaction, until the last one or until somebody asks to stop."""
    recipe = lead.recipe.train
    while True:
        try:
            await lead.restore()  # after a loss: climb the recovery ladder; otherwise seat newcomers
            step = lead.step
            done = step >= recipe.steps or lead.stop_requested
            if step and (done or _due(step, recipe.evaluate_every)) and lead.evaluated_at != step:
                await evaluate(lead, step)
            if step and (done or lead.period.due(step, lead.saved_at)) and lead.saved_at != step:
                await save_snapshot(lead)
            if done:
                return
            await refresh_routes(lead)
            await lead.world.reached(step, "begin")
            started = lead.world.now()
            plan = begin(lead)
            situation, prepared = await compute(lead, plan, step)
            await commit(lead, situation, prepared, step)
            lead.period.step_took(lead.world.now() - started)
        except PeersLost:
            continue  # nothing was applied: restore the swarm and do the step again


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def begin(lead: Lead) -> StepPlan:
    """Propose the step: a path for each microbatch through the peers that are present."""
    train = lead.recipe.train
    whole = train.full_every > 0 and (lead.step + 1) % train.full_every == 0
    view = lead.view(train.microbatches)
    plan = planners["straight" if whole else train.planner](view)
    validate(plan, view)
    return plan


async def compute(
    lead: Lead, plan: StepPlan, step: int, *, evaluate: bool = False
) -> tuple[Situation, Mapping[PeerId, Prepared]]:
    """Send each peer its share and wait until all have mixed gradients ready; returns how things were at last.

    Raises:
        PeersLost: the step cannot be saved and has to be done again.
    """
    repair = None if evaluate else repairs[lead.recipe.train.repair]
    streams = {} if evaluate else {stage: lead.keepers.streams(stage) for stage in range(lead.num_stages)}
    situation = Situation(plan, streams=streams)
    for peer, stage in lead.roster.seated():
        await lead.tell(peer, "begin", share_of(lead, situation, peer, stage, evaluate=evaluate), step)
    answers: dict[PeerId, Prepared] = {}
    while waiting := outstanding(lead, situation, answers):
        try:
            answers |= await lead.gather("prepared", waiting, Prepared, step, any_number=True)
        except PeersLost as problem:
            if repair is None or isinstance(problem, Stalled):
                raise
            situation = await mend(lead, situation, repair, step)
    return situation, {peer: answers[peer] for peer in sorted(answers) if peer in lead.roster.members}


async def commit(lead: Lead, situation: Situation, prepared: Mapping[PeerId, Prepared], step: int) -> None:
    """Check what the peers prepared, write it down, and only then let everybody apply it."""
    recipe, plan = lead.recipe.train, situation.plan
    await lead.world.reached(step, "commit")
    losses = collect_losses(lead, plan, prepared, step)
    squares = stage_squares(lead, prepared, step)
    norm = gradient_norm(lead, squares, step)
    rate, bumps = learning_rate(recipe, step), lead.bumps(step)
    shares = {peer: (stage, plan.share_of(peer)) for peer, stage in lead.roster.seated()}
    parents = [lead.accept_work(peer, answer.receipt, step, shares[peer]) for peer, answer in prepared.items()]
    paths = sorted(plan.paths, key=lambda path: path.microbatch)
    facts = Committed(
        loss=mean_loss(lead, losses, step),
        losses=tuple(losses),
        paths=tuple(tuple(lead.roster.name_of(hop.peer) for hop in path.hops) for path in paths),
        stages=tuple(tuple(hop.stage for hop in path.hops) for path in paths) if plan.ring else (),
        tokens=len(losses) * recipe.microbatch_size * lead.recipe.model.context,
        learning_rate=rate,
        gradient_norm=norm,
        stage_norms=tuple(math.sqrt(_sum(of_stage)) for of_stage in squares),
        bumps=tuple(sorted(bumps.items())),
    )
    lead.record("train.commit", facts, step=step, parents=tuple(parents))
    await lead.succession.seal()
    if recipe.replan_at:
        watch_speeds(lead, prepared)
    owners = {stage: lead.roster.holders(stage)[0] for stage, streams in situation.streams.items() if streams}
    word = msgspec.structs.replace(
        order_of(lead, facts),
        streamed=tuple((stage, owner, situation.attempts.get(stage, 0)) for stage, owner in owners.items()),
        log_from=(lead.saved_at or 0) if "replay" in lead.recipe.recovery.ladder else None,
    )
    for peer, _ in lead.roster.seated():
        await lead.tell(peer, "commit", word, step)
    for stage, streams in situation.streams.items():
        lead.keepers.committed(stage, streams, step)


def order_of(lead: Lead, facts: Committed) -> Commit:
    """What peers are told to do with the gradient that they prepared, as far as it follows from the log."""
    rate, bumps = facts.learning_rate, dict(facts.bumps)
    return Commit(
        rates=tuple(rate * bumps.get(stage, 1.0) for stage in range(lead.num_stages)),
        scale=scale_of(lead.recipe.train.clip, facts.gradient_norm),
    )


def watch_speeds(lead: Lead, prepared: Mapping[PeerId, Prepared]) -> None:
    """Compare what each peer's work took with what it should have taken; see ``train.replan_at``."""
    view = lead.view(lead.recipe.train.microbatches)
    for seat in view.seats if view.stage_s else ():
        answer = prepared.get(seat.peer)
        if answer is not None and answer.receipt is not None:
            facts = answer.receipt.open().read(Worked)
            passes = facts.forwards + 2 * facts.backwards
            expected_s = passes * view.stage_s[seat.stage] + facts.losses * view.loss_s
            lead.drift.note(seat.name, seat.speed, expected_s, facts.busy_s)


async def evaluate(lead: Lead, step: int) -> None:
    """Mean loss over held-out batches, through the same pipeline, forward only."""
    count = lead.held_out_batches
    if count == 0:
        return
    situation, prepared = await compute(lead, planners["straight"](lead.view(count)), step, evaluate=True)
    losses = collect_losses(lead, situation.plan, prepared, step)
    tokens = count * lead.recipe.train.microbatch_size * lead.recipe.model.context
    lead.record("train.evaluate", Evaluated(loss=mean_loss(lead, losses, step), tokens=tokens), step=step)
    lead.evaluated_at = step


def collect_losses(lead: Lead, plan: StepPlan, prepared: Mapping[PeerId, Prepared], step: int) -> list[float]:
    """The loss of each microbatch in order, from the peer at the end of its path, finite."""
    losses: list[float] = []
    for path in sorted(plan.paths, key=lambda path: path.microbatch):
        peer = path.hops[0 if plan.ring else -1].peer
        loss = dict(prepared[peer].losses).get(path.microbatch)
        if loss is None:
            lead.expel(peer, f"it reported no loss for microbatch {path.microbatch} of step {step}")
        if not math.isfinite(loss):
            raise _not_finite(lead, step, f"the loss of microbatch {path.microbatch} is {loss}")
        losses.append(loss)
    return losses


def mean_loss(lead: Lead, losses: list[float], step: int) -> float:
    """Mean over microbatches, exactly rounded."""
    mean = _sum(losses) / len(losses)
    if not math.isfinite(mean):
        raise _not_finite(lead, step, f"the mean loss is {mean}")
    return mean


def _sum(values: Iterable[float]) -> float:
    """Exactly rounded sum; infinite where it leaves the range of floats, as a plain sum would be."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.inf


def stage_squares(lead: Lead, prepared: Mapping[PeerId, Prepared], step: int) -> list[Sequence[float]]:
    """Squared norms of the mean gradients of each stage's tensors; replicas must agree on them."""
    squares: list[Sequence[float]] = []
    for stage in range(lead.num_stages):
        holders = lead.roster.holders(stage)
        norms = prepared[holders[0]].norms
        for peer in holders[1:]:
            others = prepared[peer].norms
            if len(others) != len(norms) or not all(map(_same, others, norms)):
                raise TalkootError(
                    "replicas of one stage disagree on its gradient",
                    where=f"step {step}, stage {stage}: {lead.roster.describe((holders[0], peer))}",
                    why="both merged the same partial sums, so one of them computed or transmitted wrongly",
                    next="remove the faulty machine and run the same command again: it resumes",
                    code=Exit.FAILED_CHECK,
                )
        if any(square < 0 for square in norms):
            lead.expel(holders[0], f"it stated a negative squared norm in step {step}")
        squares.append(norms)
    return squares


def gradient_norm(lead: Lead, squares: Sequence[Sequence[float]], step: int) -> float:
    """Norm of the whole model's mean gradient, a sum whose bits no order changes."""
    total = _sum(
        square for of_stage in squares for square in of_stage
    )  # exactly rounded: the same bits however the model is cut into stages
    if not math.isfinite(total):
        raise _not_finite(lead, step, f"the squared gradient norm is {total}")
    return math.sqrt(total)


def _same(a: float, b: float) -> bool:
    return a == b or math.isclose(a, b, rel_tol=1e-6) or (math.isnan(a) and math.isnan(b))


def _not_finite(lead: Lead, step: int, why: str) -> TalkootError:
    kept = lead.state["train"].checkpoint
    return TalkootError(
        "training diverged",
        where=f"step {step} of run {lead.world.run}",
        why=f"{why}; the step was not applied",
        next="lower train.learning_rate or train.clip and start a new run"
        + ("" if kept is None else f"; the snapshot of step {kept} is intact"),
    )
