"""The section ``mixing`` of a recipe, checked, with what it leaves open filled in by its rule. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from talkoot.core.errors import TalkootError
from talkoot.plan import spread
from talkoot.train.mixing.outer import given
from talkoot.train.mixing.rule import RoundRule, StepRule, mixing_rules
from talkoot.train.sections import Mixing

# What the engine of rounds needs of every rule whose replicas talk: the whole model at once, and merged at once.
ENGINE: dict[str, float | int] = {"fragments": 1, "overlap": 0, "keep": 0.0}
OPTIONAL = ("outer_rate", "momentum", "pull", *ENGINE)


def settled(mixing: Mixing) -> Mixing:
    """The section with the settings that its rule has a use for, none of them open; the others stay None.

    ``pull = 0`` is permitted, as an ablation: replicas then share their progress and are never pulled together.

    Raises:
        TalkootError: there is no such rule, it has no use for a setting, a value is out of its range, or replicas would
            drift apart without bound.
    """
    rule = mixing_rules[mixing.rule]
    own = rule.defaults if rule.local is True else {}
    usual = ENGINE if rule.local is True and rule.partners != "none" else {}
    known = {**usual, **own}
    for name in OPTIONAL:
        if getattr(mixing, name) is not None and name not in known:
            fit = [other for other in mixing_rules if name in _known(other)]
            raise TalkootError(
                f"mixing rule {mixing.rule!r} has no use for mixing.{name}",
                where=f"the recipe, key mixing.{name}",
                why=f"it is {getattr(mixing, name)}; rules with that setting: {', '.join(fit)}",
                next="leave it out, or choose one of those rules",
            )
    for name, used in _readers(rule):
        if not used and getattr(mixing, name) != getattr(Mixing(), name):
            raise TalkootError(
                f"mixing rule {mixing.rule!r} has no use for mixing.{name}",
                where=f"the recipe, key mixing.{name}",
                why=f"it is {getattr(mixing, name)}, and nothing that this rule does depends on it",
                next="leave it out, or choose another rule",
            )
    full = msgspec.structs.replace(mixing, **{n: v for n, v in known.items() if getattr(mixing, n) is None})
    for name, fits, permitted in _ranges(full):
        if not fits:  # NaN fits nowhere
            chosen = "" if getattr(mixing, name) is not None else f", by default with rule {mixing.rule!r}"
            raise TalkootError(
                f"mixing.{name} is out of range",
                where=f"the recipe, key mixing.{name}",
                why=f"it is {getattr(full, name)}{chosen}; it must be {permitted}",
                next="correct this value and run the same command again",
            )
    if rule.local is True and rule.law and full.pull is not None:
        spread.check(rule.law, given(full.momentum), given(full.outer_rate), full.pull)
    return full


def _readers(rule: StepRule | RoundRule) -> Iterator[tuple[str, bool]]:
    """(Setting with a default, whether the rule depends on it)."""
    local = rule.local is True
    contents = rule.contents if rule.local is True and rule.partners != "none" and not rule.codec else ()
    yield "wire", "weights" in contents
    yield "wire_gradient", "gradient" in contents
    yield "collective", rule.local is True and rule.partners == "all" and not rule.gather
    sparse = rule.local is True and rule.codec == "sparse"
    yield "density", sparse
    yield "feedback", sparse
    yield "balance", local
    yield "distance", rule.local is True and rule.partners == "pair"
    yield "deadline_s", rule.local is True and rule.partners == "pair"


def wires(rule: RoundRule, mixing: Mixing) -> tuple[str, ...]:
    """The codec by name in which each vector of the rule's message travels."""
    chosen = {"gradient": mixing.wire_gradient, "weights": mixing.wire}
    return tuple(rule.codec or chosen[content] for content in rule.contents)


def _known(name: str) -> set[str]:
    rule = mixing_rules[name]
    if rule.local is False:
        return set()
    return {*rule.defaults, *(ENGINE if rule.partners != "none" else ())}


def _ranges(knobs: Mixing) -> Iterator[tuple[str, bool, str]]:
    """(name, whether its value is permitted, what is permitted); open settings fit."""
    yield "inner_steps", knobs.inner_steps >= 1, "at least 1"
    if knobs.outer_rate is not None:
        yield "outer_rate", 0 < knobs.outer_rate < math.inf, "above 0"
    if knobs.momentum is not None:
        yield "momentum", 0 <= knobs.momentum < 1, "in [0, 1)"
    if knobs.pull is not None:
        yield "pull", 0 <= knobs.pull < math.inf, "at least 0"
    if knobs.fragments is not None:
        fits = 1 <= knobs.fragments <= knobs.inner_steps
        yield "fragments", fits, f"at least 1, and at most mixing.inner_steps, {knobs.inner_steps}"
    if knobs.overlap is not None:
        fits = 0 <= knobs.overlap < knobs.inner_steps
        yield "overlap", fits, f"at least 0, and below mixing.inner_steps, {knobs.inner_steps}"
    if knobs.keep is not None:
        yield "keep", 0 <= knobs.keep < 1, "in [0, 1)"
    yield "density", 0 < knobs.density <= 1, "in (0, 1]"
    yield "feedback", 0 <= knobs.feedback <= 1, "in [0, 1]"
    yield "deadline_s", knobs.deadline_s is None or 0 < knobs.deadline_s < math.inf, "above 0, or left out"
    yield "joiner_donors", knobs.joiner_donors >= 1, "at least 1"
    yield "distance", knobs.distance > 1, "above 1"
