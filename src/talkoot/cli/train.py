"""``talkoot train``: run a recipe for real or in virtual time, from the start or from where it stopped."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from talkoot.cli.output import Progress, blended, print_json, say
from talkoot.core.errors import Exit
from talkoot.run.folder import folder_name
from talkoot.train.chaos import with_chaos
from talkoot.train.recipe import load_recipe


def run(
    *, recipe: Path | None, sets: tuple[str, ...], sim: bool, chaos: Path | None, out: Path | None, as_json: bool
) -> None:
    """Run the verb."""
    loaded = with_chaos(load_recipe(recipe, sets), chaos)
    name = folder_name(loaded.name if recipe is None or loaded.name != "run" else recipe.stem)
    folder = out or Path("runs") / (f"{name}-sim" if sim else name)  # a rehearsal is another run than the real one
    from talkoot.train.methods import check_methods
    from talkoot.train.mixing import mixing_rules
    from talkoot.train.run import run_real, run_simulated

    check_methods(loaded)
    inner_steps = loaded.mixing.inner_steps if mixing_rules[loaded.mixing.rule].local else 0
    progress = Progress(loaded.train.steps, inner_steps=inner_steps, quiet=as_json)
    result = (run_simulated if sim else run_real)(loaded, folder, progress)
    progress.end()
    if as_json:
        print_json({"folder": str(folder), "world": "simulated" if sim else "real", **msgspec.to_builtins(result)})
    else:
        done = "already finished: nothing was done" if result.already else "finished"
        say(f"{done if result.finished else 'interrupted'} after {result.step} steps in {folder}")
        if result.state_hash:
            say(f"state {result.state_hash}")
        if result.approximate:
            say(f"approximate: {blended(result.approximate)}")
        if result.held_out is not None:
            say(f"held-out loss {result.held_out:.4f} nats per token")
        again = "" if result.finished else "the same command resumes   or   "
        export = f"   or   talkoot export {folder} MODEL_FOLDER" if result.step else ""
        say(f"next: {again}talkoot report {folder}{export}")
    if not result.finished:
        sys.exit(Exit.INTERRUPTED)
