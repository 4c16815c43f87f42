"""``talkoot status`` of a post-training run: how far it is, who learns from whom, and what each one scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from talkoot.cli.output import print_json, print_table
from talkoot.core.fold import State
from talkoot.serve.words import count, decimals, duration, size
from talkoot.tune.records import TuneState


def show_tune(state: State, tuned: TuneState, extra: Mapping[str, Any], *, as_json: bool) -> None:
    """Print it.

    Args:
        state, tuned: folded from the log, and its chapter ``tune``.
        extra: further facts of the run (``running``).
    """
    run = state["run"]
    view = {
        "world": run.world,
        "receipts": state.position,
        "log_hash": state.chain,
        "ended": run.ended,
        "sessions": run.sessions,
        **extra,
        "round": tuned.round,
        "rounds": run.steps,
        "rollbacks": tuned.rollbacks,
        "peers": {name: msgspec.to_builtins(peer, enc_hook=dict) for name, peer in tuned.peers.items()},
    }
    if as_json:
        print_json(view)
        return
    print_table([row for row in _run(view, run.start.recipe if run.start else {}) if row[1]])
    print()
    print_table(
        list(_peers(view["peers"])),
        (
            "peer",
            "here",
            "rounds",
            "last reward",
            "mean",
            "generated",
            "trained",
            "others' groups",
            "alone",
            "busy",
            "sent",
        ),
    )
    scores = list(_scores(view["peers"]))
    if scores:
        print()
        print_table(
            scores, ("peer", "split", "problems", "greedy", "average", "any right", "majority", "tokens", "cut off")
        )
    refused = [
        (name, reason, number) for name, peer in view["peers"].items() for reason, number in peer["rejected"].items()
    ]
    if refused:
        print()
        print_table(refused, ("peer", "refused because", "times"))


def _run(view: Mapping[str, Any], recipe: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    ended = view["ended"] or ("interrupted" if view.get("running", "") == "no" else "under way")
    yield "run", f"{view['world']}, {ended}" + (f"; {view['sessions']} sessions" if view["sessions"] > 1 else "")
    yield "task", str(recipe.get("task", ""))
    critic = recipe.get("critic", {}).get("kind", "none")
    rule, split = recipe.get("correction", {}).get("rule", ""), recipe.get("exchange", {}).get("split", "")
    learns = f"from a critic: {critic}" if critic != "none" else recipe.get("objective", {}).get("algorithm", "grpo")
    yield "learning", f"{learns}; others' completions by {rule}, {split}"
    yield "round", f"{view['round']} of {view['rounds'] or '-'}"
    yield "rollbacks", str(view["rollbacks"] or "")
    yield "log", f"{view['receipts']} receipts, head {view['log_hash']}"


def _peers(peers: Mapping[str, Mapping[str, Any]]) -> Iterable[tuple[Any, ...]]:
    for name, peer in peers.items():
        rounds = peer["rounds"]
        yield (
            name,
            "yes" if peer["present"] else "no",
            rounds,
            "-" if peer["reward"] is None else decimals(peer["reward"], 3),
            decimals(peer["rewards"] / rounds, 3) if rounds else "-",
            count(peer["generated"]),
            count(peer["trained"]),
            peer["external"],
            peer["alone"],
            duration(peer["busy_s"]),
            size(peer["sent_bytes"]),
        )


def _scores(peers: Mapping[str, Mapping[str, Any]]) -> Iterable[tuple[Any, ...]]:
    for name, peer in peers.items():
        for one in peer["evaluations"]:
            shares = [one[key] for key in ("greedy", "average", "passed", "majority")]
            yield (
                name,
                one["split"],
                one["items"],
                *("-" if value is None else decimals(value, 3) for value in shares),
                decimals(one["length"], 1),
                decimals(one["cut_off"], 3),
            )
