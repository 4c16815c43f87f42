"""What people and programs read: tables, JSON, errors, and the progress line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from talkoot.core.errors import TalkootError
from talkoot.core.fold import Entry, State
from talkoot.run.records import Gone, Warned
from talkoot.train.records import Blended, Committed, Mended, Recovered, RolledBack, Seated
from talkoot.train.rounds.records import Averaged


def say(text: str = "") -> None:
    """A line for people, on standard error, so that standard output stays machine-readable."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One JSON object on standard output."""
    print(json.dumps(value, indent=1, default=str), flush=True)


def print_table(rows: Sequence[Sequence[Any]], header: Sequence[str] = ()) -> None:
    """A plain aligned table on standard output."""
    cells = [[str(cell) for cell in row] for row in ([list(header)] if header else []) + [list(row) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for index, row in enumerate(cells):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if header and index == 0:
            print("  ".join("-" * width for width in widths))
    sys.stdout.flush()


def run_head(state: State, extra: Mapping[str, Any]) -> dict[str, Any]:
    """What ``talkoot status`` says first of a run of any kind whose peers work by themselves; ``extra`` comes last."""
    run = state["run"]
    return {
        "world": run.world,
        "receipts": state.position,
        "log_hash": state.chain,
        "ended": run.ended,
        "sessions": run.sessions,
        **extra,
    }


def report_error(problem: TalkootError, *, as_json: bool) -> None:
    """A user's error: what, where, why, what to do next."""
    if as_json:
        fields = {"what": problem.what, "where": problem.where, "why": problem.why, "next": problem.next}
        print_json({"error": fields, "exit_code": int(problem.code)})
    else:
        say(f"error: {problem}")


def blended(stages: Iterable[tuple[int, int]]) -> str:
    """In words, which stages were approximated when."""
    return ", ".join(f"stage {stage} was made of its neighbours at step {step}" for stage, step in stages)


class Progress:
    """An observer of a run's log that keeps one line up to date, and prints what deserves a line of its own.

    Args:
        steps: total.
        inner_steps: of a round, in a run in rounds; 0 in a run by steps.
        quiet: print nothing (``--json``).
    """

    def __init__(self, steps: int, *, inner_steps: int = 0, quiet: bool = False) -> None:
        self._steps, self._inner, self._quiet = steps, inner_steps, quiet
        self._live = sys.stderr.isatty()
        self._started = time.monotonic()
        self._first: int | None = None
        self._shown = 0.0
        self._tokens = 0

    def __call__(self, entry: Entry, state: State) -> None:
        if self._quiet:
            return
        receipt = entry.receipt
        match receipt.op:
            case "train.commit":
                self._commit(receipt.step, receipt.read(Committed), state)
            case "peer.lost":
                gone = receipt.read(Gone)
                self._line(f"step {receipt.step}: lost {gone.name} ({gone.reason})")
            case "peer.seat":
                seat = receipt.read(Seated)
                what = "takes part" if self._inner else f"holds stage {seat.stage}"
                self._line(f"step {receipt.step}: {seat.name} {what} (from {seat.source})")
            case "train.recover":
                done = receipt.read(Recovered)
                self._line(
                    f"step {receipt.step}: recovered by '{done.rung}', {done.pause_s:.2f} s after it was noticed"
                )
            case "train.blend":
                self._line(f"step {receipt.step}: {receipt.read(Blended).words()}")
            case "train.mend":
                mended = receipt.read(Mended)
                self._line(f"step {receipt.step} goes on without {', '.join(mended.lost)}: {mended.words()}")
            case "train.rollback":
                self._line(f"back to step {receipt.step}: {receipt.read(RolledBack).reason}")
            case "run.warning":
                self._line(f"warning: {receipt.read(Warned).text}")
            case "train.evaluate":
                what = "mean held-out loss of the replicas" if self._inner else "held-out loss"
                if not self._inner or state["mixing"].final is None:  # else the sentence on the final model has it
                    self._line(f"step {receipt.step}: {what} {state['train'].held_out:.4f}")
            case "train.average":
                self._line(f"the final model is {receipt.read(Averaged).words()}")

    def _commit(self, step: int, facts: Committed, state: State) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first, self._started = step, now
            return
        self._tokens += facts.tokens
        due, done = 0.2 if self._live else 5.0, step + facts.steps
        if now - self._shown < due and done < self._steps:
            return
        self._shown = now
        elapsed = max(now - self._started, 1e-9)
        rate = (step - self._first) / elapsed
        eta = (self._steps - done) / rate if rate else 0.0
        where, who = f"step {done}/{self._steps}", "peers"
        if self._inner:
            number, last = -(-done // self._inner), -(-self._steps // self._inner)
            where, who = f"round {number}/{last} ({where})", "replicas"
        text = (
            f"{where}  loss {facts.loss:.4f}  {self._tokens / elapsed:,.0f} tokens/s  "
            f"{len(state['peers'].present)} {who}  ETA {eta:.0f} s"
        )
        if self._live:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        else:
            say(text)

    def _line(self, text: str) -> None:
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr)
        say(text)

    def end(self) -> None:
        """Leave the progress line."""
        if self._live and not self._quiet:
            say()
