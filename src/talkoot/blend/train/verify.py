"""Whether the log of a run that made experts holds together: signatures, chain, and receipts that fit each other."""

from __future__ import annotations

from pathlib import Path

from talkoot.blend.recipe import UNUSABLE, BlendRecipe
from talkoot.blend.train.jobs import Job, first_jobs, planned_jobs
from talkoot.blend.train.records import BlendState, Done
from talkoot.core.fold import State, advance
from talkoot.core.log import Log
from talkoot.core.plain import build
from talkoot.core.receipt import Receipt
from talkoot.run.records import Start


def verify(path: Path) -> list[str]:
    """What is wrong, in sentences; empty where nothing is.

    The fold itself refuses slices that go backwards, jobs that end twice, and words of peers that are not there. Here
    each job's inputs are held against the results of the jobs that it was to begin with.

    Raises:
        TalkootError: the log is missing, or a signature or the hash chain does not hold.
    """
    log, state, findings = Log(path, readonly=True), State(), list[str]()
    recipe: BlendRecipe | None = None
    try:
        for entry in log.entries():
            receipt = entry.receipt
            if receipt.op == "run.start" and receipt.read(Start).recipe.get("domains"):
                recipe = build(receipt.read(Start).recipe, BlendRecipe, what=UNUSABLE, where=str(path))
            if receipt.op == "blend.done" and recipe is not None:
                wrong = _wrong(receipt, state["blend"], recipe)
                findings += [f"receipt {entry.position}: {wrong}"] if wrong else []
            state = advance(state, entry)
    finally:
        log.close()
    return findings


def _wrong(receipt: Receipt, state: BlendState, recipe: BlendRecipe) -> str:
    facts, planned = receipt.read(Done), state.planned
    jobs = planned_jobs(recipe, planned.plan, planned.classes) if planned else first_jobs(recipe)
    job: Job | None = next((one for one in jobs if one.name == facts.job), None)
    if job is None:
        return f"nobody asked for {facts.job}"
    wanted = {name: state.jobs[name].result for name in job.after if name in state.jobs}
    if receipt.task.inputs != wanted:
        return f"{facts.job} did not begin with what the jobs before it left"
    return "" if facts.steps == job.steps else f"{facts.job} took {facts.steps} of {job.steps} steps"
