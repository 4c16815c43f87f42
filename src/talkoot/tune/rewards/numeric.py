"""Numbers: ``1,234.50``, ``-7/8``, ``2e-3``. Read digit by digit into fractions; nothing is ever evaluated."""

from __future__ import annotations

import re
from fractions import Fraction

from talkoot.tune.rewards.answer import answer_in
from talkoot.tune.rewards.result import RewardResult
from talkoot.tune.rewards.reward import comparisons, outcome

MAX_DIGITS = 40  # of one number; bounds what arithmetic on a stranger's number can cost
RELATIVE_TOLERANCE = Fraction(1, 10**6)  # between decimals; whole numbers and fractions must be equal

_DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(rf"[-+]?(?:{_DECIMAL})(?:[eE][-+]?[0-9]{{1,2}}(?![0-9]))?(?:/[0-9]+)?(?![0-9])")
_TOLERANCE = re.compile(r"(.+?)(?:\u00b1|\+-)(.+)")


def number_in(text: str) -> str:
    """The last number of a text, as written; empty = none."""
    text = text.replace("\u2212", "-")
    found = ""
    for match in _NUMBER.finditer(text):
        found, before = match.group(), text[match.start() - 1 : match.start()]
        if found[0] in "-+":
            found = found[1:] if before.isalnum() else found  # an operation or a hyphen, no sign
        elif before.isdigit() or before in (".", ","):
            found = ""  # the rest of something that is no number
    return found


def parse_number(text: str) -> Fraction | None:
    """The number that a text is, as a whole; None when it is none, or too long."""
    text = text.strip().replace("\u2212", "-")
    if not _NUMBER.fullmatch(text) or sum(map(str.isdigit, text)) > MAX_DIGITS:
        return None
    above, _, below = text.replace(",", "").partition("/")
    if below and not int(below):
        return None
    return Fraction(above) / (int(below) if below else 1)


class Numeric:
    """Equal numbers. The right answer may name its tolerance: ``3.14 +- 0.01``."""

    def check(self, answer: str) -> None:
        number, tolerance = _parts(answer)
        if number is None or tolerance is None:
            raise ValueError(f"{answer[:40]!r} is no number, and no number +- tolerance")

    def extract(self, completion: str) -> str:
        number = parse_number(number_in(answer_in(completion)))
        return "" if number is None else str(number)

    def reward(self, answer: str, given: str) -> RewardResult:
        number, tolerance = _parts(answer)
        other = parse_number(given)
        if number is None or tolerance is None or other is None:
            return outcome(False)
        return outcome(abs(number - other) <= tolerance)


def _parts(answer: str) -> tuple[Fraction | None, Fraction | None]:
    """The number and how far from it still counts."""
    if match := _TOLERANCE.fullmatch(answer):
        return parse_number(match[1]), parse_number(match[2])
    number = parse_number(answer)
    decimal = "." in answer or "e" in answer.lower()
    return number, abs(number or 0) * RELATIVE_TOLERANCE if decimal else Fraction(0)


comparisons.register("numeric")(Numeric())
