"""Small programming problems: what the program prints must be right, and it is really run, in the sandbox.

``code`` has all kinds of problems, ``code:KIND`` one. The ``shifted`` ones have larger numbers and longer texts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cached_property

from talkoot.core.errors import TalkootError, nearest
from talkoot.core.ids import digest
from talkoot.tune.rewards import comparisons
from talkoot.tune.rewards.result import RewardResult
from talkoot.tune.rewards.reward import refused
from talkoot.tune.tasks.splits import HELD_OUT, SHIFTED, TRAIN, is_held_out, member, numbered
from talkoot.tune.tasks.task import Item, task_kinds

HALF = 4096  # indices below are of ordinary size, those from here to twice as many are shifted
Problem = tuple[str, object, str]  # what is asked for, what is to be printed, a program that prints it


def _value(rng: random.Random, scale: int) -> Problem:
    a, b, c = (rng.randint(2, 50 * scale) for _ in range(3))
    forms = (f"{a} + {b} * {c}", a + b * c), (f"{a} * {b} - {c}", a * b - c), (f"({a} - {b}) * {c}", (a - b) * c)
    text, value = rng.choice(forms)
    return f"the value of {text}", value, f"print({text})"


def _multiples(rng: random.Random, scale: int) -> Problem:
    step, stop = rng.randint(2, 12), rng.randint(20, 100 * scale)
    asked = f"the sum of all multiples of {step} from {step} to {stop}"
    return asked, sum(range(step, stop + 1, step)), f"print(sum(range({step}, {stop + 1}, {step})))"


def _letters(rng: random.Random, scale: int) -> Problem:
    word = "".join(rng.choice("abcde") for _ in range(rng.randint(5, 12 * scale)))
    letter = rng.choice("abcde")
    return f"how often {letter} occurs in {word}", word.count(letter), f'print("{word}".count("{letter}"))'


def _backwards(rng: random.Random, scale: int) -> Problem:
    word = "".join(rng.choice("abcdefghij") for _ in range(rng.randint(4, 8 * scale)))
    return f"{word} backwards", word[::-1], f'print("{word}"[::-1])'


def _divisor(rng: random.Random, scale: int) -> Problem:
    shared = rng.randint(2, 12 * scale)
    a, b = shared * rng.randint(2, 20), shared * rng.randint(2, 20)
    asked = f"the greatest common divisor of {a} and {b}"
    return asked, math.gcd(a, b), f"import math\nprint(math.gcd({a}, {b}))"


def _ordered(rng: random.Random, scale: int) -> Problem:
    numbers = [rng.randint(0, 99) for _ in range(rng.randint(3, 6 * scale))]
    listed = ", ".join(map(str, numbers))
    answer = " ".join(map(str, sorted(numbers)))
    return f"{listed} in ascending order, with spaces between", answer, f"print(*sorted([{listed}]))"


KINDS: dict[str, Callable[[random.Random, int], Problem]] = {
    "backwards": _backwards,
    "divisor": _divisor,
    "letters": _letters,
    "multiples": _multiples,
    "ordered": _ordered,
    "value": _value,
}


class Code:
    """Programming problems of some kinds.

    Args:
        kinds: names from ``KINDS``.
        seed: of the problems and splits.
    """

    alphabet = "".join(map(chr, range(32, 127))) + "\n"
    max_new_tokens = 120

    def __init__(self, name: str, kinds: list[str], seed: int) -> None:
        self.name, self.kinds, self.seed = name, kinds, seed

    def digest(self) -> str:
        return digest(f"1/{','.join(self.kinds)}/{self.seed}".encode(), "task")

    def size(self, split: str) -> int:
        return len(member(self._splits, split))

    def index(self, split: str, number: int) -> int:
        return numbered(member(self._splits, split), number, split)

    def item(self, index: int) -> Item:
        if not 0 <= index < 2 * HALF:
            raise ValueError(f"item {index} of {self.name} does not exist: there are {2 * HALF}")
        rng = random.Random(f"code/{self.seed}/{index}")
        make = KINDS[self.kinds[index % len(self.kinds)]]
        asked, answer, program = make(rng, 1 if index < HALF else 3)
        return Item(prompt=f"Write a Python program that prints {asked}.\n", answer=str(answer), solution=program)

    def reward(self, item: Item, completion: str, finished: bool) -> RewardResult:
        given = self.extract(completion)
        return refused(given, finished) or comparisons["code"].reward(item.answer, given)

    def extract(self, completion: str) -> str:
        return comparisons["code"].extract(completion)

    @cached_property
    def _splits(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {TRAIN: [], HELD_OUT: [], SHIFTED: []}
        seen: set[str] = set()
        for index in range(2 * HALF):
            prompt = self.item(index).prompt
            if prompt not in seen:
                seen.add(prompt)
                ordinary = HELD_OUT if is_held_out(self.seed, prompt) else TRAIN
                found[ordinary if index < HALF else SHIFTED].append(index)
        return found


@task_kinds.register("code")
def code(argument: str, seed: int) -> Code:
    """``code`` or ``code:KIND``."""
    if argument and argument not in KINDS:
        raise TalkootError(
            f"there are no programming problems of the kind {argument!r}",
            where=f"task code:{argument}",
            why=nearest(argument, KINDS),
            next=f"use code for all kinds, or one of: {', '.join(sorted(KINDS))}",
        )
    return Code(f"code:{argument}" if argument else "code", [argument] if argument else sorted(KINDS), seed)
