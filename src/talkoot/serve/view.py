"""One view of a run, folded from its log entry by entry; the report and the live page both show this.

Everything here is bounded, however long the run is: curves and lanes are thinned (`series.py`), lists keep what is
newest. Times are seconds that the run was up (`hours.py`): a resumed run continues where it stopped.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from talkoot.core.fold import START, Entry, link
from talkoot.core.ids import short
from talkoot.core.receipt import Receipt
from talkoot.serve import about, blended, tuned
from talkoot.serve.blended import Blended, is_blending
from talkoot.serve.events import Event, Events
from talkoot.serve.hours import Hours
from talkoot.serve.part import Part
from talkoot.serve.peers import Peers
from talkoot.serve.rounds import Rounds, terms_of
from talkoot.serve.series import Curve, tidy
from talkoot.serve.tuned import Tuned, is_tuning
from talkoot.serve.words import clean, duration, name_of
from talkoot.train import records
from talkoot.train.rounds.records import Averaged, Kept, Rounded
from talkoot.tune.records import TuneRolledBack

VERSION = 1
STEP, SECONDS, LOSS, SMOOTH, RATE, NORM, TOKENS = range(7)
COLUMNS = ("step", "seconds", "loss", "smooth", "learning_rate", "gradient_norm", "tokens")
BAND = ("low", "high")  # the replicas' smallest and largest loss, further columns of a run in rounds
SMOOTHING = 25, 64  # the smoothed loss averages over 1 + step / 25 steps, at most 64
WINDOW = 24  # latest commits, for the speed
MAX_ROUTES = 48
PARTS: dict[str, tuple[Callable[[Mapping[str, Any]], bool], Callable[[Mapping[str, Any]], Part]]] = {
    Tuned.key: (is_tuning, Tuned),
    Blended.key: (is_blending, Blended),
}


class View:
    """What is shown of a run, after the entries that :meth:`advance` was given."""

    def __init__(self) -> None:
        self.position, self.chain = 0, START
        self.run: dict[str, Any] = {}
        self.session: dict[str, Any] = {
            "status": "waiting",
            "reason": "",
            "sessions": 0,
            "state_hash": "",
            "approximate": "",
        }
        self.step = self.tokens = self.rollbacks = self.undone = 0
        self.loss: float | None = None
        self.peers = Peers()
        self.rounds: Rounds | None = None  # of a run in rounds
        self.part: Part | None = None  # of post-training, or of experts
        self.curve, self.held_out = Curve(LOSS, NORM), Curve(2)
        self.hours = Hours()
        self.routes: dict[str, Any] = {"step": None, "paths": [], "microbatches": 0}
        self.receipts: Counter[str] = Counter()
        self._events = Events()
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=WINDOW)

    def advance(self, entry: Entry) -> None:
        """Take one more entry into account.

        Raises:
            ValueError: the entry is not the next one, or does not continue the hash chain.
        """
        if entry.position != self.position + 1 or link(self.chain, entry.id) != entry.chain:
            raise ValueError(f"receipt {entry.position} does not follow receipt {self.position}")
        self.position, self.chain = entry.position, entry.chain
        receipt = entry.receipt
        op = clean(receipt.op, 32)
        self.receipts[op if op in self.receipts or len(self.receipts) < 40 else "(others)"] += 1
        self.hours.clock(receipt)
        handler = _HANDLERS.get(receipt.op)
        if handler is None:
            return
        try:
            handler(self, receipt)
        except ValueError:
            self._tell(receipt, "problem", f"Receipt {entry.position} ({op}) cannot be read.")

    def advance_all(self, entries: Iterable[Entry]) -> View:
        """Take all ``entries`` into account; returns this view."""
        for entry in entries:
            self.advance(entry)
        return self

    def snapshot(self) -> dict[str, Any]:
        """The view as plain data for JSON: bounded, every number finite, every text fit for one line."""
        window = about.pace(self._recent, self.step, self.run.get("steps"), self.session["status"])
        progress = {"step": self.step, "steps": self.run.get("steps"), "tokens": self.tokens, **window}
        last = self.held_out.rows[-1][2] if self.held_out.rows else None
        return {
            "version": VERSION,
            "run": self.run,
            "session": self.session,
            "progress": progress
            | {"loss": tidy(self.loss), "held_out": tidy(last), "elapsed": about.moment(self.now)}
            | {"rollbacks": self.rollbacks, "undone": self.undone},
            "curve": self.curve.columns((*COLUMNS, *BAND) if self.rounds else COLUMNS),
            "held_out": self.held_out.columns(("step", "seconds", "loss")),
            "peers": self.peers.table(self.now),
            "mixing": self.rounds.snapshot(self.step, self.run.get("steps")) if self.rounds else None,
            **dict.fromkeys(PARTS),
            **({self.part.key: self.part.snapshot()} if self.part else {}),
            "timeline": self._timeline(),
            "routes": self.routes,
            "events": self._events.newest_first(),
            "receipts": {"count": self.position, "head": self.chain, "by_operation": dict(self.receipts)},
        }

    def _timeline(self) -> dict[str, Any]:
        lanes = []
        for peer in self.peers.lanes():
            lane = self.hours.lanes[peer.id]
            spans, recent = ([about.span(s) for s in part] for part in (lane.spans, lane.recent))
            here = [about.interval(start, end, self.now) for start, end in peer.here]
            facts = {
                "peer": clean(short(peer.id)),
                "name": peer.name,
                "stage": peer.stage,
                "slot": peer.slot,
                "state": peer.state,
            }
            lanes.append({**facts, "here": here, "spans": spans, "recent": recent})
        return {"end": about.moment(self.now), "lanes": lanes, "marks": self._events.marks()}

    @property
    def now(self) -> float:  # seconds that the run was up
        return self.hours.now

    def _tell(self, receipt: Receipt, kind: str, text: str, peer: str = "", *, mark: bool = False) -> None:
        self._events.add(Event(self.position, self.now, receipt.step, kind, clean(text), peer), mark=mark)

    # One method per operation.

    def _start(self, receipt: Receipt) -> None:
        facts = receipt.read(records.Start)
        self.run = about.run_facts(receipt, facts)
        terms = terms_of(facts)
        self.rounds = Rounds(terms) if terms else None
        self.part = next((make(facts.recipe) for is_one, make in PARTS.values() if is_one(facts.recipe)), None)
        self.run["steps"] = self.part.steps if self.part else self.run["steps"]
        self.peers.speeds = about.speeds(facts.recipe)
        self._session()
        if self.part and self.part.ended:
            self.session["status"] = "done"
            return
        self._tell(receipt, "start", f"The run began in the {self.run['world']} world.")

    def _resume(self, receipt: Receipt) -> None:
        facts = receipt.read(records.Resume)
        self.run["world"] = about.world_of(facts.world)
        self.run["steps"] = facts.steps or self.run.get("steps")
        self._part(receipt)
        self._session()
        self._tell(receipt, "start", "The run was resumed.", mark=True)

    def _session(self) -> None:
        self.session.update(status="running", reason="", sessions=self.session["sessions"] + 1)
        self.peers.all_leave(self.now)
        self.hours.clear()
        self._recent.clear()
        self._recent.append((self.now, self.tokens, self.step))

    def _end(self, receipt: Receipt) -> None:
        facts = receipt.read(records.End)
        reason = clean(facts.reason)
        status = reason if reason in ("done", "interrupted") else "stopped"
        self.session.update(status=status, reason=reason, state_hash=clean(facts.state_hash, 64))
        self.hours.settle()
        self._part(receipt)
        self.peers.all_leave(self.now)
        words = {"done": "The run is complete.", "interrupted": "The run was interrupted; it can be resumed."}
        self._tell(receipt, "end", words.get(reason, f"The run stopped: {reason}."))

    def _standby(self, receipt: Receipt) -> None:
        facts = receipt.read(records.Appointed)
        text = "stands by for the lead" if facts.peer else f"stands by no more: {clean(facts.reason)}"
        self._tell(receipt, "join" if facts.peer else "lost", f"{name_of(facts.name)} {text}.")

    def _succeed(self, receipt: Receipt) -> None:
        facts = receipt.read(records.Succeeded)
        self.session.update(status="running", reason="")
        text = f"The lead was lost; {name_of(facts.name)} leads on, with {len(facts.peers)} peers that lost it too."
        self._tell(receipt, "recover", text, mark=True)

    def _warning(self, receipt: Receipt) -> None:
        self._tell(receipt, "problem", clean(receipt.read(records.Warned).text))

    def _join(self, receipt: Receipt) -> None:
        facts = receipt.read(records.Joined)
        for gone in self.peers.join(facts.peer, facts.name, self.now):
            self.hours.lanes.forget(gone)
        self._part(receipt)
        self._tell(receipt, "join", f"{name_of(facts.name)} joined.", facts.peer, mark=True)

    def _seat(self, receipt: Receipt) -> None:
        facts = receipt.read(records.Seated)
        self.peers.seat(facts.peer, facts.stage)
        source = f" (state from {clean(facts.source, 80)})" if facts.source else ""
        what = "takes part" if self.rounds else f"took stage {facts.stage}"
        self._tell(receipt, "seat", f"{name_of(facts.name)} {what}{source}.", facts.peer, mark=True)

    def _lost(self, receipt: Receipt) -> None:
        facts = receipt.read(records.Gone)
        self.peers.lose(facts.peer, self.now)
        self._part(receipt)
        self._tell(receipt, "lost", f"{name_of(facts.name)} was lost: {clean(facts.reason)}", facts.peer, mark=True)

    def _work(self, receipt: Receipt) -> None:
        facts = receipt.read(records.Worked)
        self.peers.credit(receipt.peer, facts)
        if self.peers.knows(receipt.peer):
            self.hours.work(receipt, receipt.started, facts.busy_s)

    def _mixing(self, receipt: Receipt) -> None:
        if self.rounds is None:
            return
        self.rounds.take(receipt)
        match receipt.op:
            case "train.round":
                facts = receipt.read(Rounded)
                start = self.peers.credit_round(receipt, facts)
                if start is not None:
                    self.hours.work(receipt, start, facts.busy_s)
            case "train.view":
                self.peers.place(self.rounds.state.view)
            case "train.kept":
                done = receipt.read(Kept).round
                self._tell(receipt, "checkpoint", f"All replicas stored their states after round {done}.", mark=True)
            case _:
                self._tell(receipt, "evaluate", f"The final model is {receipt.read(Averaged).words()}.")

    def _commit(self, receipt: Receipt) -> None:
        facts = receipt.read(records.Committed)
        self.hours.settle()
        steps = facts.steps if self.rounds else 1
        self.step, self.tokens = receipt.step + steps, self.tokens + facts.tokens
        loss = facts.loss if math.isfinite(facts.loss) else None
        if loss is None and self.loss is not None:
            self._tell(receipt, "problem", f"The loss of step {self.step} is not a number.")
        before = self.curve.rows[-1][SMOOTH] if self.curve.rows else None
        smooth = before if loss is None else loss
        if loss is not None and before is not None:
            keep = 1 - 1 / min(1 + self.step / SMOOTHING[0], SMOOTHING[1])
            smooth = before + (loss - before) * (1 - keep**steps)  # a round's loss is a mean over its steps
        self.loss = loss
        norm = facts.gradient_norm if math.isfinite(facts.gradient_norm) else None
        band = about.band(facts.losses) if self.rounds else ()
        self.curve.add((self.step, self.now, loss, smooth, facts.learning_rate, norm, self.tokens, *band))
        if self.rounds:
            self.rounds.commit(self.step, self.now)
        self._recent.append((self.now, self.tokens, self.step))
        self.routes = about.routes(self.step, facts, MAX_ROUTES)

    def _part(self, receipt: Receipt) -> None:
        """A run without commits goes on: what peers report moves the clock, the steps and the tokens."""
        part = self.part
        if part is None:
            return
        for told in part.take(receipt):
            self._tell(receipt, told.kind, told.text, receipt.peer if told.own else "", mark=told.mark)
        work = part.work(receipt)
        if work is not None:
            start = self.peers.credit_work(receipt, work.busy_s, work.sent_bytes)
            if start is not None:
                self.hours.work(receipt, start, work.busy_s)
            if (confirmed := part.now()) is not None:
                self.hours.reach(confirmed)
                self.hours.settle(over=True)
        if receipt.op == "tune.rollback":
            self._undo(receipt, receipt.read(TuneRolledBack))
        self.tokens = part.tokens
        if work is not None and self.step != part.step:
            self._recent.append((self.now, self.tokens, part.step))
        self.step, self.run["steps"] = part.step, part.steps

    def _undo(self, receipt: Receipt, facts: TuneRolledBack) -> None:
        self.hours.settle()
        undone = max(self.step - facts.round, 0)
        self.rollbacks, self.undone = self.rollbacks + 1, self.undone + undone
        self.hours.lanes.void(facts.round)
        self._recent.clear()
        self._recent.append((self.now, self.tokens, facts.round))
        text = f"The run went back to round {facts.round}: {clean(facts.reason)}."
        self._tell(receipt, "rollback", text, mark=True)

    def _evaluate(self, receipt: Receipt) -> None:
        facts = receipt.read(records.Evaluated)
        self.held_out.cut(receipt.step - 1)
        loss = facts.loss if math.isfinite(facts.loss) else None
        self.held_out.add((receipt.step, self.now, loss))
        what = self.rounds.judged() if self.rounds else "Held-out loss"
        self._tell(receipt, "evaluate", f"{what} after {receipt.step} steps: {facts.loss:.4f}.")

    def _checkpoint(self, receipt: Receipt) -> None:
        receipt.read(records.Checkpointed)
        self._tell(receipt, "checkpoint", f"A checkpoint of step {receipt.step} was written.", mark=True)

    def _rollback(self, receipt: Receipt) -> None:
        facts = receipt.read(records.RolledBack)
        self.hours.settle()
        undone = max(self.step - receipt.step, 0)
        self.rollbacks, self.undone = self.rollbacks + 1, self.undone + undone
        self.curve.cut(receipt.step)
        self.held_out.cut(receipt.step)
        self.hours.lanes.void(receipt.step)
        if self.rounds:
            self.rounds.roll_back(receipt.step)
        last = self.curve.rows[-1] if self.curve.rows else None
        held, tokens = (last[STEP] or 0, last[TOKENS] or 0) if last else (0, 0)
        self.tokens = int(tokens if held == receipt.step else self.tokens / max(self.step, 1) * receipt.step)
        self.step, self.loss = receipt.step, last[LOSS] if last else None
        self._recent.clear()
        self._recent.append((self.now, self.tokens, self.step))
        steps = f"{undone} step{'s' if undone != 1 else ''} undone"
        text = f"The run went back to step {receipt.step} ({steps}): {clean(facts.reason)}"
        self._tell(receipt, "rollback", text, mark=True)

    def _recover(self, receipt: Receipt) -> None:
        facts = receipt.read(records.Recovered)
        lost = ", ".join(name_of(name) for name in facts.lost[:6]) or "a peer"
        paused = f"back {duration(facts.pause_s)} after it was noticed" if facts.pause_s > 0 else "nobody waited"
        how = ", approximately" if facts.approximate else ""
        text = f"Recovered from the loss of {lost} by {clean(facts.rung, 40)}{how}; {paused}."
        self._tell(receipt, "recover", text, mark=True)

    def _blend(self, receipt: Receipt) -> None:
        text = f"Step {receipt.step}: {receipt.read(records.Blended).words()}."
        self.session["approximate"] = self.session["approximate"] or f"approximate since step {receipt.step}"
        self._tell(receipt, "problem", text, mark=True)

    def _mend(self, receipt: Receipt) -> None:
        facts = receipt.read(records.Mended)
        lost = ", ".join(name_of(name) for name in facts.lost[:6]) or "a peer"
        self._tell(receipt, "recover", f"Step {receipt.step} went on without {lost}: {facts.words()}.", mark=True)


_HANDLERS = {
    "run.start": View._start,
    "run.resume": View._resume,
    "run.end": View._end,
    "run.standby": View._standby,
    "run.succeed": View._succeed,
    "run.warning": View._warning,
    "peer.join": View._join,
    "peer.seat": View._seat,
    "peer.lost": View._lost,
    "train.step": View._work,
    "train.round": View._mixing,
    "train.view": View._mixing,
    "train.kept": View._mixing,
    "train.average": View._mixing,
    "train.commit": View._commit,
    "train.evaluate": View._evaluate,
    "train.checkpoint": View._checkpoint,
    "train.rollback": View._rollback,
    "train.recover": View._recover,
    "train.blend": View._blend,
    "train.mend": View._mend,
    **dict.fromkeys((*tuned.OPS, *blended.OPS), View._part),
}


def view_of(entries: Iterable[Entry]) -> dict[str, Any]:
    """The finished view of a log's entries."""
    return View().advance_all(entries).snapshot()
