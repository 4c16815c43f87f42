"""A short rehearsal of a run in rounds, with an odd number of replicas of which one is lost, for pages to show."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from talkoot.run.journal import Observer, unobserved
from talkoot.train.recipe import build_recipe
from talkoot.train.run import run_simulated

STEPS, INNER_STEPS, REPLICAS = 36, 4, 5


def rehearse(
    folder: Path, observer: Observer = unobserved, steps: int = STEPS, lost: str = "cedar", **mixing: Any
) -> None:
    """Train in virtual time; the log is in ``folder`` then.

    Args:
        folder, observer: as for any run.
        steps: how many.
        lost: who is killed on the way; empty = nobody.
        mixing: overrides that section of the recipe.
    """
    recipe = {
        "name": "orchards",
        "seed": 3,
        "data": {"tokenizer": "bytes"},
        "model": {"depth": 1, "context": 16},
        "train": {
            "steps": steps,
            "learning_rate": 1e-2,
            "microbatches": REPLICAS,
            "microbatch_size": 1,
            "evaluate_every": 12,
            "evaluate_batches": 1,
            "checkpoint_every": 16,
        },
        "mixing": {"rule": "noloco", "inner_steps": INNER_STEPS, **mixing},
        "swarm": {"stages": 1, "replicas": REPLICAS, "speeds": [1.0, 0.5, 1.0, 1.0, 1.0]},
        "faults": [{"peer": lost, "kind": "kill", "step": 13, "phase": "forward"}] if lost else [],
    }
    run_simulated(build_recipe(recipe, "a test's recipe"), folder, observer)


if __name__ == "__main__":
    rehearse(Path(sys.argv[1]))
