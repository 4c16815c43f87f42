"""Running a recipe that makes experts, in either world; at its end the folder holds a blend.

``OUT/`` holds ``log.sqlite`` (the receipts), ``lead.key``, ``tokenizer/``, ``tokens/`` (packed text), ``blobs/``
(states) and ``lock``; at the end also what :mod:`talkoot.blend.folder` describes. The same call on a folder with an
unfinished run continues it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from talkoot.blend.folder import EXPERTS, STATISTICS, Blend, Expert
from talkoot.blend.recipe import FREE, BlendRecipe
from talkoot.blend.train.lead import BlendLead
from talkoot.blend.train.learner import from_bytes
from talkoot.blend.train.messages import BlendJob
from talkoot.blend.train.records import BlendState, Planned
from talkoot.blend.train.texts import check_readable, prepare_tokenizer
from talkoot.core.errors import TalkootError
from talkoot.core.fold import fold
from talkoot.core.log import Log
from talkoot.model.config import ModelConfig
from talkoot.model.folder import write_file
from talkoot.model.huggingface import save_folder
from talkoot.model.tokenizer import Tokenizer
from talkoot.run.journal import Observer, unobserved
from talkoot.run.records import Start
from talkoot.run.worlds import Place, differing, lead_real, lead_simulated, open_log
from talkoot.world.api import Host
from talkoot.world.blobs import Blobs

PRELOAD = ("torch", "torch._dynamo", "talkoot.blend.train.learner")
GENERAL = "general"


class BlendResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended.

    Attributes:
        finished: all jobs are done; ``already``: they were before.
        planned: who got what; None where the run has not come that far.
        losses: of each expert (column) on each domain's held-out text (row), nats per token.
        busy_s: seconds of work.
    """

    finished: bool
    already: bool
    planned: Planned | None
    losses: dict[str, dict[str, float]]
    busy_s: float


def train_experts(
    recipe: BlendRecipe,
    folder: Path,
    *,
    simulated: bool = False,
    observer: Observer = unobserved,
    started: Callable[[BlendLead], None] = lambda lead: None,
) -> BlendResult:
    """Train, in virtual time or with one process per peer on this machine.

    Args:
        recipe: what to run.
        folder: the run's and the blend's; made when absent, continued when not.
        observer: called with every new log entry and the state after it.
        started: called with the lead before anything is done (to inject faults, for instance).
    """
    world = "simulated" if simulated else "real"
    for domain in recipe.domains:
        check_readable(domain)
    with open_log(folder, world, lambda start: _check_same_run(start, recipe, folder)) as log:
        tokenizer = prepare_tokenizer(recipe, folder)
        configs = recipe.configs(tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id or 0)
        already = _finished(log)
        if not already:
            job = BlendJob(recipe=recipe, folder=str(folder.absolute()))

            def make(host: Host) -> BlendLead:
                lead = BlendLead(host, job, configs, log, observer)
                started(lead)
                return lead

            place = Place(
                name=recipe.name,
                seed=recipe.seed,
                folder=folder,
                host=recipe.run.host,
                network=recipe.network if recipe.run.emulate or simulated else None,
                threads=recipe.run.threads,
                preload=PRELOAD,
            )
            (lead_simulated if simulated else lead_real)(place, log, make)
        state: BlendState = fold(log.entries())["blend"]
        if _finished(log):
            _write_blend(recipe, folder, state, tokenizer, configs)
        return BlendResult(
            finished=_finished(log),
            already=already,
            planned=state.planned,
            losses={
                name.removeprefix("score/"): dict(job.losses)
                for name, job in state.jobs.items()
                if name.startswith("score/") and job.done
            },
            busy_s=sum(job.busy_s for job in state.jobs.values()),
        )


def _write_blend(
    recipe: BlendRecipe, folder: Path, state: BlendState, tokenizer: Tokenizer, configs: dict[str, ModelConfig]
) -> None:
    """Put the results where a blend has them; what is there already is left alone."""
    blend, blobs = Blend.open_or_new(folder), Blobs(folder / "blobs")
    planned = state.planned
    if planned is None:
        return
    if not blend.manifest.general:
        _write_model(folder / GENERAL, configs["medium"], blobs.get(state.jobs["general/medium"].result), tokenizer)
        blend.set_general(GENERAL)
    for one in planned.plan:
        if one.domain in blend.names:
            continue
        job, counted = state.jobs[f"expert/{one.domain}"], state.jobs[f"count/{one.domain}"]
        config = configs[one.size]
        _write_model(folder / EXPERTS / one.domain, config, blobs.get(job.result), tokenizer)
        statistics = f"{STATISTICS}/{one.domain}.safetensors"
        (folder / STATISTICS).mkdir(exist_ok=True)
        write_file(folder / statistics, blobs.get(counted.result))
        blend.put(
            Expert(
                name=one.domain,
                model=f"{EXPERTS}/{one.domain}",
                parameters=config.num_parameters(),
                tokenizer=tokenizer.digest(),
                statistics=statistics,
                source=recipe.domain(one.domain).source,
                trained=_facts(recipe, one.size, job),
            )
        )


def _facts(recipe: BlendRecipe, size: str, job: Any) -> dict[str, Any]:
    return {
        "size": size,
        "steps": job.steps,
        "tokens": job.tokens,
        "flops": job.flops,
        "weights": recipe.experts.trained,
        "validation_loss": job.losses.get("validation"),
        "peer": job.peer,
    }


def _write_model(folder: Path, config: ModelConfig, blob: bytes, tokenizer: Tokenizer) -> None:
    if folder.exists() and not any(folder.iterdir()):
        shutil.rmtree(folder)
    save_folder(folder, config, from_bytes(blob)[0], tokenizer)


def _finished(log: Log) -> bool:
    count = len(log)
    last = next(log.entries(count, count), None) if count else None
    if last is None or last.receipt.op != "run.end":
        return False
    return fold(log.entries())["run"].ended == "done"


def _check_same_run(start: Start | None, recipe: BlendRecipe, folder: Path) -> None:
    if start is None:
        return
    if "experts" not in start.recipe:
        raise TalkootError(
            "this folder holds a run of another kind",
            where=str(folder),
            why="it was not made by `talkoot blend train`",
            next="name another folder with --out",
        )
    if changed := differing(start.recipe, recipe.plain(), FREE):
        raise TalkootError(
            "this folder holds another run",
            where=str(folder),
            why=f"its recipe differs in {', '.join(changed)}",
            next="use the run's own recipe to continue it, or --out for a new folder",
        )
