"""``talkoot status`` of a post-training run: how far it is, who learns from whom, and what each one scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from talkoot.cli.output import print_json, print_table, run_head
from talkoot.core.fold import State
from talkoot.serve.tuned import summary, terms
from talkoot.serve.words import count, decimals, duration, share, size
from talkoot.tune.records import TuneState


def show_tune(state: State, tuned: TuneState, extra: Mapping[str, Any], *, as_json: bool) -> None:
    """Print it.

    Args:
        state, tuned: folded from the log, and its chapter ``tune``.
        extra: further facts of the run (``running``).
    """
    run = state["run"]
    view = {
        **run_head(state, extra),
        **summary(terms(run.start.recipe if run.start else {}), tuned),
        "rounds": run.steps or None,
        "rollbacks": tuned.rollbacks,
        "peers": {name: msgspec.to_builtins(peer, enc_hook=dict) for name, peer in tuned.peers.items()},
    }
    if as_json:
        print_json(view)
        return
    print_table([row for row in _run(view) if row[1]])
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


def _run(view: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    ended = view["ended"] or ("interrupted" if view.get("running", "") == "no" else "under way")
    yield "run", f"{view['world']}, {ended}" + (f"; {view['sessions']} sessions" if view["sessions"] > 1 else "")
    yield "task", view["task"]
    learns = f"feedback of {view['critic']}" if view["critic"] else view["algorithm"]
    yield "learning", f"{learns}; others' completions by {view['correction']}, {view['split']}"
    ahead = f"; the furthest peer is at {view['furthest']}" if view["furthest"] > view["round"] else ""
    yield "round", f"{view['round']} of {view['rounds'] or '-'}{ahead}"
    yield "reward", _spread(view["reward"], decimals, "newest rounds")
    yield "held out", _spread(view["greedy"], share, "greedily right")
    alone, many = view["alone"], len(view["peers"]) > 1
    only = "all: there is one peer"
    yield "alone", f"{alone['rounds']} of {alone['of']} rounds ({share(alone['share'])})" if many else only
    yield "refused", f"{count(view['refused'])} records or completions of others" if view["refused"] else ""
    yield "rollbacks", str(view["rollbacks"] or "")
    stored = view["stored"]
    yield "stored", f"all peers' states after round {stored}: a resume goes on from there" if stored else ""
    yield "log", f"{view['receipts']} receipts, head {view['log_hash']}"


def _spread(values: Mapping[str, float | None], form: Any, what: str) -> str:
    if values["mean"] is None:
        return ""
    return f"{form(values['mean'])} on average, {form(values['low'])} to {form(values['high'])} ({what})"


def rounds_of(peer: Mapping[str, Any]) -> str:
    """How far a peer is, and how many rounds it did itself, where it left some out."""
    return str(peer["rounds"]) + (f" (did {peer['updates']})" if peer["updates"] != peer["rounds"] else "")


def _peers(peers: Mapping[str, Mapping[str, Any]]) -> Iterable[tuple[Any, ...]]:
    for name, peer in peers.items():
        yield (
            name,
            "yes" if peer["present"] else "no",
            rounds_of(peer),
            "-" if peer["reward"] is None else decimals(peer["reward"], 3),
            decimals(peer["rewards"] / peer["updates"], 3) if peer["updates"] else "-",
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
            keys = {"avg": 3, "passed": 3, "majority": 3, "length": 1, "cut_off": 3}
            sampled = [(one[key], digits) for key, digits in keys.items()]
            yield (
                name,
                one["split"],
                one["problems"],
                decimals(one["greedy"], 3),
                *(decimals(value, digits) if one["samples"] else "-" for value, digits in sampled),
            )
