"""What is shown of a run in rounds: how replicas mix, what that costs, and how far apart they are, beside the formulas.

The figures come from the chapter ``mixing`` of the state alone, so that every view of a run tells the same.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Any

import msgspec

from talkoot.core.errors import TalkootError
from talkoot.core.receipt import Receipt
from talkoot.model.config import ModelConfig
from talkoot.run.records import Start
from talkoot.serve.series import Curve, tidy
from talkoot.serve.words import clean, name_of
from talkoot.train.mixing import mixing_rules, settled
from talkoot.train.rounds.prospects import ALARM, expected_bytes, expected_spread, is_far
from talkoot.train.rounds.records import MixingState, Rounded, mixed
from talkoot.train.sections import Mixing

LAST_ROUNDS = 16  # of whose meetings are counted
MAX_NAMES = 64  # replicas that are listed
MAX_MEETINGS = 4096
EACH, MEAN, EXPECTED = 2, 3, 4  # columns of the curve of the spread
CURVE = ("step", "seconds", "each", "mean", "expected")


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What the recipe says of a run in rounds: ``mixing``, settled, and how many numbers (values) a replica holds."""

    mixing: Mixing
    values: int

    def rounds(self, steps: int | None) -> int | None:
        """How many rounds so many steps are."""
        return None if steps is None else math.ceil(steps / self.mixing.inner_steps)


def terms_of(start: Start) -> Terms | None:
    """The terms, or None for a run by steps and for a recipe that cannot be read."""
    try:
        section = start.recipe.get("mixing", {})
        known = {key: section[key] for key in Mixing.__struct_fields__ if key in section}  # of whatever version it is
        mixing = settled(msgspec.convert(known, Mixing))
        if not mixing_rules[mixing.rule].local:
            return None
        config = msgspec.convert(start.config, ModelConfig)
        return Terms(mixing=mixing, values=sum(config.layer_parameters()))
    except (TalkootError, ValueError, TypeError, ArithmeticError):
        return None


def summary(terms: Terms, state: MixingState, step: int, steps: int | None) -> dict[str, Any]:
    """The run's mixing in figures, fit for JSON.

    Args:
        terms: what the recipe says.
        state: the chapter ``mixing``.
        step, steps: committed ones, and how many there are to be.
    """
    mixing, rule = terms.mixing, mixing_rules[terms.mixing.rule]
    view, taken = state.view, sum(slot.steps for slot in state.slots.values())
    replicas = len(view.names) if view else 0
    expected = expected_spread(mixing, replicas)
    bytes_per_round = expected_bytes(mixing, terms.values, replicas)
    return {
        "rule": mixing.rule,
        "partners": rule.partners if rule.local is True else "",
        "replicas": replicas,
        "inner_steps": mixing.inner_steps,
        "round": terms.rounds(step),
        "rounds": terms.rounds(steps),
        "alone": {
            "rounds": state.alone,
            "of": state.rounds,
            "share": tidy(state.alone / state.rounds) if state.rounds else None,
            "why": {clean(why, 60): n for why, n in sorted(state.why.items(), key=lambda item: -item[1])},
        },
        "one_sided": state.one_sided,
        "stored_step": state.kept_round * mixing.inner_steps if state.kept else None,
        "idle": {"share": tidy(state.idle), "wait_s": tidy(state.wait_s), "busy_s": tidy(state.busy_s)},
        "sent_bytes": {
            "per_round": tidy(state.sent_bytes / state.rounds) if state.rounds else None,
            "per_inner_step": tidy(state.sent_bytes / taken) if taken else None,
            "expected_per_round": tidy(bytes_per_round),
            "expected_per_inner_step": tidy(bytes_per_round * state.rounds / taken) if taken else None,
        },
        "spread": {
            "measured": tidy(state.spread),
            "expected": tidy(expected),
            "alarm_factor": ALARM,
            "alarm": is_far(state, expected),
            "receipts": state.measured,
        },
        "held_out": _held_out(state),
        "by_replica": [_replica(state, slot) for slot in sorted({*state.slots, *state.names})[:MAX_NAMES]],
    }


def _held_out(state: MixingState) -> dict[str, float | None]:
    """Of the final replicas and their mean model, once there is one; of those that are here until then."""
    if state.final is not None:
        final = state.final
        return {"mean": tidy(final.mean), "best": tidy(final.best), "averaged": tidy(final.held_out)}
    here = state.view.slots if state.view else ()
    known = [state.held_out[slot] for slot in here if slot in state.held_out]
    mean, best = (sum(known) / len(known), min(known)) if known else (None, None)
    return {"mean": tidy(mean), "best": tidy(best), "averaged": None}


def _replica(state: MixingState, slot: int) -> dict[str, Any]:
    view, sums, steps = state.view, state.slots.get(slot), None
    if view is not None and slot in view.slots:
        steps = view.steps[view.slots.index(slot)]
    facts = {"slot": slot, "name": name_of(state.names.get(slot, f"slot {slot}")), "steps_per_round": steps}
    facts |= {"held_out": tidy(state.held_out.get(slot))}
    if sums is None:
        return facts | {"rounds": 0, "alone": 0, "tokens": 0, "wait_s": 0.0, "busy_s": 0.0, "sent_bytes": 0}
    return facts | {
        "rounds": sums.rounds,
        "alone": sums.alone,
        "tokens": sums.tokens,
        "wait_s": tidy(sums.wait_s),
        "busy_s": tidy(sums.busy_s),
        "sent_bytes": sums.sent_bytes,
    }


class Rounds:
    """A run in rounds, receipt by receipt: the chapter, the curve of the spread, and who met whom lately."""

    def __init__(self, terms: Terms) -> None:
        self.terms, self.state = terms, MixingState()
        self._curve = Curve(EACH, MEAN)
        self._since = (0.0, 0.0)  # apart and progress, summed over receipts since the last commit
        self._meetings: deque[tuple[int, int, tuple[str, ...]]] = deque(maxlen=MAX_MEETINGS)  # round, slot, partners

    def take(self, receipt: Receipt) -> None:
        """One more receipt of the chapter's operations; ValueError when it cannot be read."""
        self.state = mixed(self.state, receipt)
        if receipt.op == "train.round":
            facts = receipt.read(Rounded)
            told = (facts.apart or 0.0, facts.progress or 0.0)
            if all(map(math.isfinite, told)):
                self._since = self._since[0] + told[0], self._since[1] + told[1]
            self._meetings.append((receipt.step // self.terms.mixing.inner_steps, facts.slot, facts.partners))

    def commit(self, step: int, now: float) -> None:
        """A round was committed, ``step`` steps into the run."""
        apart, progress = self._since
        self._since = (0.0, 0.0)
        if self.state.spread:
            expected = expected_spread(self.terms.mixing, len(self.state.view.names) if self.state.view else 0)
            each = apart / progress if progress else None
            self._curve.add((step, now, each or None, self.state.spread, expected))

    def judged(self) -> str:
        """What the held-out loss is that the log states now."""
        return "Mean held-out loss of the replicas" if not self.state.final else "Held-out loss of the averaged model"

    def roll_back(self, step: int) -> None:
        """The run went back to ``step``."""
        self._curve.cut(step)
        self._meetings = deque(
            (one for one in self._meetings if one[0] * self.terms.mixing.inner_steps < step), maxlen=MAX_MEETINGS
        )

    def snapshot(self, step: int, steps: int | None) -> dict[str, Any]:
        """The summary, with curve and meetings."""
        return summary(self.terms, self.state, step, steps) | {"curve": self._curve.columns(CURVE), "met": self._met()}

    def _met(self) -> dict[str, Any]:
        """How often each two met in the last rounds, and how often each replica had a round alone."""
        newest = max((number for number, _, _ in self._meetings), default=-1)
        lately = [one for one in self._meetings if one[0] > newest - LAST_ROUNDS]
        here = self.state.view.slots if self.state.view else ()
        slots = sorted({*here, *(slot for _, slot, _ in lately)})[:MAX_NAMES]
        known, slot_of = self.state.names, {name: slot for slot, name in self.state.names.items()}
        place = {slot: index for index, slot in enumerate(slots)}
        rounds, alone, pairs = Counter[int](), Counter[int](), Counter[tuple[int, int]]()
        for _, slot, partners in lately:
            if slot not in place:
                continue
            rounds[place[slot]] += 1
            alone[place[slot]] += not partners
            for partner in set(partners):
                if (other := place.get(slot_of.get(partner, -1))) is not None:
                    pairs[place[slot], other] += 1
        return {
            "names": [name_of(known.get(slot, f"slot {slot}")) for slot in slots],
            "rounds": min(newest + 1, LAST_ROUNDS),
            "of": [rounds[index] for index in range(len(slots))],
            "alone": [alone[index] for index in range(len(slots))],
            "pairs": [[row, column, n] for (row, column), n in sorted(pairs.items())],
        }
