"""``talkoot status`` and ``talkoot replay``: a run's state, now or at any point of its past, from its log alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from talkoot.cli.check import check_log
from talkoot.cli.output import blended, print_json, print_table
from talkoot.cli.status_blend import show_blend
from talkoot.cli.status_rounds import show_rounds
from talkoot.cli.status_tune import show_tune
from talkoot.core.errors import TalkootError
from talkoot.core.fold import State, advance
from talkoot.core.log import Log
from talkoot.run.folder import LOG
from talkoot.run.lock import holder
from talkoot.serve.rounds import summary, terms_of


def status(run: Path, *, as_json: bool, check: bool = False) -> None:
    """Where the run stands now; with ``check``, what is wrong with its log instead."""
    if check:
        check_log(run, as_json=as_json)
        return
    _show(_state(run, None, None), as_json, {"running": holder(run) or "no"})


def replay(run: Path, *, to: int | None, step: int | None, as_json: bool) -> None:
    """The state after ``to`` receipts, or when ``step`` steps (rounds) were first committed."""
    _show(_state(run, to, step), as_json, {})


def _state(run: Path, to: int | None, step: int | None) -> State:
    log = Log(run / LOG, readonly=True)
    try:
        state, length = State(), len(log)
        if to is not None and not 0 <= to <= length:
            raise _out_of_range(run, f"receipt {to}", f"the log holds {length} receipts")
        for entry in log.entries(1, length if to is None else to) if to != 0 else ():
            state = advance(state, entry)
            if step is not None and _reached(state) >= step:
                return state
        if step is not None and _reached(state) < step:
            what, done = ("round", "done by all") if state["tune"].active else ("step", "committed")
            raise _out_of_range(run, f"{what} {step}", f"{_reached(state)} {what}s are {done}")
        return state
    finally:
        log.close()


def _reached(state: State) -> int:
    """Committed steps; in post-training, rounds that everybody has done."""
    return state["tune"].round if state["tune"].active else state["train"].step


def _out_of_range(run: Path, asked: str, why: str) -> TalkootError:
    return TalkootError(
        "the run has not come that far", where=f"{run}, {asked}", why=why, next="ask for an earlier one"
    )


def _show(state: State, as_json: bool, extra: dict[str, Any]) -> None:
    if state["tune"].active:
        show_tune(state, state["tune"], extra, as_json=as_json)
        return
    if state["blend"].active:
        show_blend(state, state["blend"], extra, as_json=as_json)
        return
    run, peers, train = state["run"], state["peers"], state["train"]
    present = {peer: msgspec.to_builtins(facts) for peer, facts in peers.present.items()}
    words = blended(train.blended.items()) or "nothing: the run is exact"
    view = {
        "world": run.world,
        "receipts": state.position,
        "log_hash": state.chain,
        "ended": run.ended,
        "sessions": run.sessions,
        "lead": run.lead[:8],
        "standby": run.heir[:8],
        "successions": run.successions,
        **extra,
        **msgspec.to_builtins(train, enc_hook=dict),
        "blended": {str(stage): step for stage, step in train.blended.items()} if as_json else words,
        "steps": run.steps,
        "state_hash": run.state_hash,
        "peers_joined": peers.joined,
        "peers_lost": peers.lost,
        "peers": present,
    }
    terms = terms_of(run.start) if run.start else None
    if terms is not None:
        view["mixing"] = summary(terms, state["mixing"], train.step, run.steps or None)
    if as_json:
        print_json(view)
        return
    if terms is not None:
        show_rounds(view, present)
        return
    print_table([(key, "-" if value in (None, "") else value) for key, value in view.items() if key != "peers"])
    if present:
        print()
        rows = [
            (p["name"], peer[:8], p["stage"], p["microbatches"], f"{p['busy_s']:.2f}") for peer, p in present.items()
        ]
        print_table(rows, ("peer", "id", "stage", "microbatches", "busy s"))
