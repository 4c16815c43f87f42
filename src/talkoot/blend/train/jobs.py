"""What there is to do, as a pure function of the recipe and of what is done: no queue, nothing to save or hand over.

A *job* is performed by one peer. ``general`` trains what experts begin as, one per size that is needed; ``trial``
takes a few steps on a domain to see how it is learned; ``expert`` trains a domain's; ``count`` makes the statistics of
its text; ``score`` says what every expert's loss on its held-out text is. Experts exchange nothing (branch, train and
keep apart: arXiv 2208.03306, 2502.19385).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from talkoot.blend.recipe import BlendRecipe
from talkoot.plan.experts import Assigned, lanes


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A unit of work.

    Attributes:
        name: unique in the run.
        kind: ``general``, ``trial``, ``expert``, ``count`` or ``score``.
        domain, size: what it is about; ``size`` of the model.
        steps: of training.
        after: jobs whose results it needs; ``start``: the one of them whose weights it begins with.
    """

    name: str
    kind: str
    domain: str = ""
    size: str = "medium"
    steps: int = 0
    after: tuple[str, ...] = ()
    start: str = ""


class Class(msgspec.Struct, frozen=True):
    """A domain's difficulty as it was given or found."""

    domain: str
    difficulty: str


def first_jobs(recipe: BlendRecipe) -> list[Job]:
    """What is needed before experts can be planned: the medium general model, and trials where classes are missing."""
    jobs = [_general(recipe, "medium")] if recipe.is_estimated else []
    if recipe.is_estimated:
        steps = recipe.experts.trial_steps
        jobs += [
            Job(
                name=f"trial/{domain.name}",
                kind="trial",
                domain=domain.name,
                steps=steps,
                after=("general/medium",),
                start="general/medium",
            )
            for domain in recipe.domains
        ]
    return jobs


def planned_jobs(recipe: BlendRecipe, plan: Sequence[Assigned], classes: Sequence[Class]) -> list[Job]:
    """Everything, once it is decided who gets what."""
    sizes = {one.domain: one.size for one in plan}
    # A lane goes on only where the model keeps its shape.
    parents = lanes({one.domain: one.difficulty for one in classes}) if recipe.experts.lanes else {}
    parents = {name: parent for name, parent in parents.items() if sizes[name] == sizes[parent]}
    jobs = [_general(recipe, size) for size in sorted({*sizes.values(), "medium"})]
    jobs += [job for job in first_jobs(recipe) if job.kind == "trial"]
    for one in plan:
        start = f"expert/{parents[one.domain]}" if one.domain in parents else f"general/{one.size}"
        jobs.append(
            Job(
                name=f"expert/{one.domain}",
                kind="expert",
                domain=one.domain,
                size=one.size,
                steps=one.steps,
                after=(start,),
                start=start,
            )
        )
    experts = tuple(f"expert/{one.domain}" for one in plan)
    for domain in recipe.domains:
        jobs.append(Job(name=f"count/{domain.name}", kind="count", domain=domain.name))
        jobs.append(Job(name=f"score/{domain.name}", kind="score", domain=domain.name, after=experts))
    return jobs


def ready(jobs: Sequence[Job], done: Mapping[str, bool], running: frozenset[str], allowed: Sequence[str]) -> list[Job]:
    """Jobs that a peer can begin now, those on which most depends first.

    Args:
        done: by job's name, whether it is done; absent = not begun.
        running: names of jobs that somebody performs.
        allowed: domains whose text the peer may read.
    """
    open_jobs = [job for job in jobs if not done.get(job.name) and job.name not in running]
    fits = [job for job in open_jobs if not job.domain or job.domain in allowed]
    free = [job for job in fits if all(done.get(name) for name in job.after)]
    order = ("general", "trial", "expert", "count", "score")
    return sorted(free, key=lambda job: (order.index(job.kind), -job.steps, job.name))


def _general(recipe: BlendRecipe, size: str) -> Job:
    steps = 0 if recipe.model.load else recipe.general.steps
    return Job(name=f"general/{size}", kind="general", size=size, steps=steps)
