"""``talkoot plan --failures``: which rung of the recovery ladder serves for each loss of a stage, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from talkoot.cli.output import print_table
from talkoot.model.config import ModelConfig
from talkoot.plan.ladder import Case, judge, keepers, losses, steady_cost
from talkoot.train.prospects import recovery_case
from talkoot.train.recipe import Recipe


def losses_view(recipe: Recipe, config: ModelConfig, iteration_s: float) -> dict[str, Any]:
    """What every loss would cost, who keeps what for whom, and what that costs while nobody is lost, as plain data."""
    case = recovery_case(recipe, config, iteration_s)
    return {
        "ladder": list(case.ladder),
        "losses": [_loss(case, words, lost) for words, lost in losses(case)],
        "keepers": [{"stage": stage, "peers": list(names)} for stage, names in keepers(case).items()],
        "steady": [
            {
                "rung": rung,
                "sent_bytes_per_iteration": cost.bytes,
                "link_seconds_per_iteration": cost.link_s,
                "waited_seconds_per_iteration": cost.exposed_s,
                "kept_bytes": cost.kept_bytes,
            }
            for rung in case.ladder
            for cost in (steady_cost(case, rung),)
        ],
        "iteration_s": iteration_s,
        "jump_iterations": case.jump_iterations,
    }


def _loss(case: Case, words: str, lost: frozenset[str]) -> dict[str, Any]:
    verdict = judge(case, lost)
    return {
        "lost": words,
        "peers": list(verdict.lost),
        "rung": "+".join(sorted(set(verdict.rungs.values()))) or "none",
        "exact": verdict.exact,
        "seconds": verdict.seconds if math.isfinite(verdict.seconds) else None,
        "none_because": verdict.why or None,
    }


def show_losses(view: Mapping[str, Any]) -> None:
    """Print both tables."""
    print(f"\nwhat the loss of a stage costs; ladder: {', then '.join(view['ladder']) or 'empty'}")
    print_table([_cells(row) for row in view["losses"]], ("lost", "rung", "the state after it", "lost time"))
    if any("blend" in row["rung"] for row in view["losses"]):
        jump = f"{view['jump_iterations']:g} iterations"
        print(f"a blend is taken to set training back by {jump}: see talkoot bench recovery")
    rows = [
        (
            row["rung"],
            f"{row['sent_bytes_per_iteration'] / 1e6:,.2f} MB",
            f"{row['link_seconds_per_iteration']:.3f} s",
            f"{row['waited_seconds_per_iteration']:.3f} s of {view['iteration_s']:.3f} s",
            f"{row['kept_bytes'] / 1e6:,.1f} MB",
        )
        for row in view["steady"]
        if row["sent_bytes_per_iteration"] or row["kept_bytes"]
    ]
    if rows:
        print("\nwhat that costs while nobody is lost, at most per peer")
        print_table(rows, ("rung", "sent per iteration", "on the link", "of that, waited for", "kept for others"))


def _cells(row: Mapping[str, Any]) -> Sequence[str]:
    if row["seconds"] is None:
        return row["lost"], "none", f"the run ends: {row['none_because'].partition('; ')[0]}", ""
    return row["lost"], row["rung"], "exact" if row["exact"] else "approximate", f"{row['seconds']:,.2f} s"
