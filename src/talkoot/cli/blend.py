"""``talkoot blend``: experts trained apart, and what is made of them; each verb below it leaves a whole blend."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import msgspec

from talkoot.blend.folder import Blend
from talkoot.blend.recipe import load_blend_recipe
from talkoot.blend.train.records import Done, Planned, Sliced
from talkoot.cli.output import print_json, print_table, say
from talkoot.core.errors import Exit
from talkoot.core.fold import Entry, State
from talkoot.run.folder import folder_name
from talkoot.run.records import Gone

NEXT = ("blend route", "blend upcycle", "serve")


def train(*, recipe: Path | None, sets: tuple[str, ...], sim: bool, out: Path | None, as_json: bool) -> None:
    """Train experts, or go on with a run that was interrupted."""
    loaded = load_blend_recipe(recipe, sets)
    name = folder_name(loaded.name if recipe is None or loaded.name != "blend" else recipe.stem)
    folder = out or Path("runs") / (f"{name}-sim" if sim else name)
    from talkoot.blend.train.run import train_experts

    result = train_experts(loaded, folder, simulated=sim, observer=BlendProgress(quiet=as_json))
    if as_json:
        print_json({"folder": str(folder), "world": "simulated" if sim else "real", **msgspec.to_builtins(result)})
    else:
        done = "already finished: nothing was done" if result.already else "finished"
        say(f"{done if result.finished else 'interrupted'} in {folder}, {result.busy_s:,.0f} s of work")
        if result.finished:
            show_losses(result.losses)
            say("next: " + "   or   ".join(f"talkoot {verb} {folder}" for verb in NEXT))
        else:
            say("next: the same command resumes")
    if not result.finished:
        sys.exit(Exit.INTERRUPTED)


def show_losses(losses: dict[str, dict[str, float]]) -> None:
    """The cross table: perplexity of each expert on each domain's held-out text; a star marks the best of a row."""
    names = list(losses)
    rows = []
    for domain in names:
        found = losses[domain]
        best = min(found, key=lambda expert: found[expert])
        rows.append((domain, *(f"{math.exp(min(found[one], 99)):.1f}{'*' if one == best else ''}" for one in names)))
    print_table(rows, ("held-out perplexity", *(f"by {name}" for name in names)))


def show(folder: Path, *, as_json: bool) -> None:
    """What a blend holds."""
    blend = Blend.open(folder)
    if as_json:
        print_json(msgspec.to_builtins(blend.manifest))
        return
    print_table(
        [
            (
                expert.name,
                f"{expert.parameters:,}",
                expert.trained.get("steps", "-"),
                expert.trained.get("weights", "-"),
                "yes" if expert.statistics else "no",
                expert.source or "-",
                expert.model,
            )
            for expert in blend
        ]
        or [("(none yet)", *[""] * 6)],
        ("expert", "parameters", "steps", "trained", "statistics", "text", "folder"),
    )
    if blend.manifest.general:
        print(f"\nfor text that no expert knows: {blend.manifest.general}")


class BlendProgress:
    """An observer of a run's log that prints what is done.

    Args:
        quiet: print nothing.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet

    def __call__(self, entry: Entry, state: State) -> None:
        if self._quiet:
            return
        receipt, names = entry.receipt, state["blend"].names
        who = names.get(receipt.peer, receipt.peer[:8])
        match receipt.op:
            case "blend.slice":
                facts = receipt.read(Sliced)
                say(f"{facts.job}: step {facts.steps}, loss {facts.loss:.4f} ({who})")
            case "blend.done":
                facts = receipt.read(Done)
                loss = facts.losses.get("validation")
                say(f"{facts.job}: done ({who})" + (f", held-out loss {loss:.4f}" if loss is not None else ""))
            case "blend.plan":
                planned = receipt.read(Planned)
                classes = {one.domain: one.difficulty for one in planned.classes}
                told = [f"{one.domain} ({classes[one.domain]}) {one.size}, {one.steps} steps" for one in planned.plan]
                off = abs(planned.flops / planned.budget - 1)
                say(f"planned '{planned.allocation}': {'; '.join(told)}; compute within {off:.2%} of equal")
            case "peer.lost":
                gone = receipt.read(Gone)
                say(f"lost {gone.name} ({gone.reason})")
