"""Step traces of an addition: write them, take them apart, find the first mistake. Pure functions of two texts.

``47+85=`` is worked as ``7+5+0=12;4+8+1=13;132``: one step per column from the right (``u+v+carry=sum``, the sum always
with two digits, so that positions do not move), then the answer. Operands of a step may stand in either order. Letters
in front of the first step are a habit of whoever writes, not a mistake.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

END = ";"  # of a step
SLOT = "|"  # between a context in front of a prompt, and the prompt

_PROMPT = re.compile(r"([0-9]{1,18})\+([0-9]{1,18})=")
_LETTERS = re.compile(r"[a-z]*")


class Column(msgspec.Struct, frozen=True):
    """What is to be added in one column: two digits and the carry that comes in."""

    upper: int
    lower: int
    carry: int

    @property
    def total(self) -> int:
        """From 0 to 19."""
        return self.upper + self.lower + self.carry

    def step(self, swapped: bool = False, total: int | None = None, carry: int | None = None) -> str:
        """Its step as text, with the end character. ``total`` and ``carry``: other values than the right ones."""
        first, second = (self.lower, self.upper) if swapped else (self.upper, self.lower)
        total = self.total if total is None else total
        return f"{first}+{second}+{self.carry if carry is None else carry}={total:02d}{END}"


class Step(msgspec.Struct, frozen=True):
    """A piece of a completion up to and with an end character: ``completion[start:stop] == text``."""

    text: str
    start: int
    stop: int


class Trace(msgspec.Struct, frozen=True):
    """A completion taken apart; nothing in it need be right, or even look like a step.

    Attributes:
        prefix: letters in front.
        steps: the pieces that end with an end character, in order.
        answer: what stands behind the last step.
        answer_start: where it begins, in characters.
    """

    prefix: str
    steps: tuple[Step, ...]
    answer: str
    answer_start: int


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How far a completion is right.

    Attributes:
        status: ``right`` (all of it), ``unfinished`` (all that is there, but more is needed) or ``wrong``.
        step: number of the first wrong or missing step from 0; the answer counts as one more; of a right one, past it.
        start: where this step begins: ``completion[:start]`` is whole and right.
        at: the first wrong character (or where the text ends): ``completion[:at]`` can still become right.
        correction: a right text from ``start`` to the end, in the order of operands that the writer used.
    """

    status: Literal["right", "unfinished", "wrong"]
    step: int
    start: int
    at: int
    correction: str


def columns(prompt: str) -> list[Column]:
    """The columns of a prompt from the right.

    Raises:
        ValueError: it is no addition of two numbers.
    """
    match = _PROMPT.fullmatch(prompt)
    if match is None:
        raise ValueError(f"{prompt[:40]!r} is no addition like '47+85='")
    width = max(len(number) for number in match.groups())
    upper, lower = (number.zfill(width) for number in match.groups())
    found, carry = [], 0
    for u, v in zip(reversed(upper), reversed(lower), strict=True):
        found.append(Column(int(u), int(v), carry))
        carry = found[-1].total // 10
    return found


def total(prompt: str) -> str:
    """The right answer of a prompt."""
    return answer_of([column.total % 10 for column in columns(prompt)], columns(prompt)[-1].total // 10)


def answer_of(digits: Sequence[int], carry: int) -> str:
    """The answer that follows from the sums' last digits (from the right) and the last carry; no leading zeros."""
    return str(int("".join(map(str, [carry, *reversed(digits)]))))


def worked(prompt: str, swapped: Sequence[bool] = ()) -> str:
    """The right completion; ``swapped``: per column, whether its operands change places (missing ones do not)."""
    steps = [column.step(number < len(swapped) and swapped[number]) for number, column in enumerate(columns(prompt))]
    return "".join(steps) + total(prompt)


def in_context(context: str, prompt: str) -> str:
    """A prompt with a text in the context slot in front of it."""
    return f"{context}{SLOT}{prompt}"


def parse(completion: str) -> Trace:
    """Take a completion apart; any text will do."""
    prefix = _letters(completion)
    steps, start = [], len(prefix)
    while (stop := completion.find(END, start) + 1) > 0:
        steps.append(Step(completion[start:stop], start, stop))
        start = stop
    return Trace(prefix, tuple(steps), completion[start:], start)


def judge(prompt: str, completion: str) -> Verdict:
    """Find the first mistake of a completion."""
    start, swapped = len(_letters(completion)), False
    work = columns(prompt)
    for number, column in enumerate(work):
        rest = completion[start:]
        forms = [column.step(), column.step(swapped=True)]
        agreed = [_agreeing(form, rest) for form in forms]
        if agreed[0] != agreed[1]:
            swapped = agreed[1] > agreed[0]
        length = max(agreed)
        if length < len(forms[0]):
            correction = "".join(later.step(swapped) for later in work[number:]) + total(prompt)
            status = "unfinished" if length == len(rest) else "wrong"
            return Verdict(status=status, step=number, start=start, at=start + length, correction=correction)
        start += length
    answer, rest = total(prompt), completion[start:]
    if rest == answer:
        return Verdict(status="right", step=len(work) + 1, start=len(completion), at=len(completion), correction="")
    length = _agreeing(answer, rest)
    status = "unfinished" if length == len(rest) else "wrong"
    return Verdict(status=status, step=len(work), start=start, at=start + length, correction=answer)


def _letters(completion: str) -> str:
    match = _LETTERS.match(completion)
    return match.group() if match else ""


def _agreeing(first: str, second: str) -> int:
    """How many characters both begin with."""
    for at, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return at
    return min(len(first), len(second))
