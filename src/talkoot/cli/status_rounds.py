"""``talkoot status`` of a run in rounds: how far it is, how its replicas mix, and what each of them has done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from talkoot.cli.output import print_table
from talkoot.serve.words import UNKNOWN, count, decimals, duration, figures, reasons, share, size

SOON = "not judged yet"


def show_rounds(view: Mapping[str, Any], present: Mapping[str, Mapping[str, Any]]) -> None:
    """Print it.

    Args:
        view: what ``--json`` prints.
        present: peers by id that are there now.
    """
    facts = view["mixing"]
    print_table([(name, text) for name, text in [*_run(view, facts, len(present)), *_mixing(facts)] if text])
    rows = list(_replicas(facts["by_replica"], {peer["name"]: key for key, peer in present.items()}))
    heads = ("replica", "id", "slot", "rounds", "alone", "steps", "waits", "sent", "tokens/s", "held out")
    if not present:  # nobody has an id now
        rows, heads = [(row[0], *row[2:]) for row in rows], (heads[0], *heads[2:])
    if rows:
        print()
        print_table(rows, heads)


def _run(view: Mapping[str, Any], facts: Mapping[str, Any], here: int) -> Iterable[tuple[str, str]]:
    ended = view["ended"] or ("interrupted" if view.get("running", "") == "no" else "under way")
    now = "" if view["ended"] else f"{here} present, "
    back = f"; {view['rollbacks']} rollbacks" if view["rollbacks"] else ""
    yield "run", f"{view['world']}, {ended}" + (f"; {view['sessions']} sessions" if view["sessions"] > 1 else "")
    yield "round", f"{facts['round']} of {facts['rounds'] or UNKNOWN} (step {view['step']} of {view['steps']})"
    yield "replicas", f"{now}{view['peers_joined']} joined, {view['peers_lost']} lost{back}"
    yield "tokens", count(view["tokens"])
    yield "loss", "" if view["loss"] is None else f"{decimals(view['loss'], 4)}, mean of the replicas' last round"
    yield "held-out loss", _held_out(facts["held_out"])
    stored = facts["stored_step"]
    yield "stored", "" if stored is None else f"all replicas' states after step {stored}: a resume goes on from there"
    yield "checkpoint", "" if view["checkpoint"] is None else f"{view['manifest']}, the averaged model"
    yield "state hash", view["state_hash"]
    yield "log", f"{view['receipts']} receipts, head {view['log_hash']}"


def _held_out(held: Mapping[str, float | None]) -> str:
    if held["mean"] is None:
        return SOON
    text = f"replicas {decimals(held['mean'], 4)} on average, {decimals(held['best'], 4)} at best"
    return text if held["averaged"] is None else f"{decimals(held['averaged'], 4)} averaged model; {text}"


def _mixing(facts: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    alone, sent, idle, spread = facts["alone"], facts["sent_bytes"], facts["idle"], facts["spread"]
    yield "mixing", f"{facts['rule']}, {facts['replicas']} replicas, {facts['inner_steps']} inner steps per round"
    if facts["partners"] == "pair":
        why = f": {reasons(alone['why'])}" if alone["why"] else ""
        sided = f"; {facts['one_sided']} one-sided merges" if facts["one_sided"] else ""
        yield "alone", f"{alone['rounds']} of {alone['of']} rounds ({share(alone['share'])}){why}{sided}"
    yield "waiting", f"{share(idle['share'])} of the time ({duration(idle['wait_s'])}, over all replicas)"
    if sent["expected_per_round"]:
        per_step = f"{size(sent['per_inner_step'])} per inner step"
        yield "sent per replica", f"{size(sent['per_round'])} per round, {per_step}"
        each = f"{size(sent['expected_per_inner_step'])} per inner step"
        yield "  by formula", f"{size(sent['expected_per_round'])} per round, {each}"
    yield "replica spread", _spread(facts["partners"], spread)
    if spread["alarm"]:
        yield "CAUTION", "replicas are much further apart than their rule should keep them"


def _spread(partners: str, spread: Mapping[str, Any]) -> str:
    if partners == "all":
        return "none: all replicas start each round from the same weights"
    if partners == "none":
        return "no bound: nothing brings these replicas together"
    formula = "no formula" if spread["expected"] is None else f"by formula {figures(spread['expected'])}"
    measured = f"{figures(spread['measured'])} times the variance of a round's progress"
    return f"{measured if spread['measured'] is not None else 'not measured yet'}; {formula}"


def _replicas(rows: Iterable[Mapping[str, Any]], ids: Mapping[str, str]) -> Iterable[tuple[Any, ...]]:
    for row in rows:
        spent = row["wait_s"] + row["busy_s"]
        yield (
            row["name"],
            ids.get(row["name"], "")[:8] or "-",
            row["slot"],
            row["rounds"],
            row["alone"],
            row["steps_per_round"] or "-",
            share(row["wait_s"] / spent) if spent else "-",
            size(row["sent_bytes"]),
            count(row["tokens"] / row["busy_s"]) if row["busy_s"] else "-",
            decimals(row["held_out"], 4) if row["held_out"] is not None else "-",
        )
