"""Addition with a step per column: the task of tests and benches, small enough for a model of 0.2 million parameters.

Items are pairs of numbers with the same count of digits, neither with a zero in front. ``shifted`` are those where both
begin with the same digit (``47+42=``): columns that training shows, but never in that place. Warm starts learn from
demonstrations with mistakes in them (:class:`Habits`), so that a model knows the form, and has something left to learn
from its rewards.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from talkoot.core.errors import TalkootError
from talkoot.core.ids import digest
from talkoot.core.plain import build
from talkoot.tune.rewards.result import RewardResult
from talkoot.tune.rewards.reward import compare
from talkoot.tune.tasks.splits import HELD_OUT, SHIFTED, TRAIN, is_held_out, member, numbered
from talkoot.tune.tasks.task import Item, task_kinds
from talkoot.tune.tasks.traces import SLOT, Column, answer_of, columns, in_context, judge, parse, worked

LETTERS = "abcdefghijklmn"  # no item uses them: room for habits of two models, and for strangers' marks
MOST_DIGITS = 6
MOST_PREFIX = 4  # letters in front of a trace
_LIMITS = {TRAIN: 16384, HELD_OUT: 1024, SHIFTED: 1024}  # items of a split at most
_ENUMERABLE = 2  # digits up to which all pairs are listed
_DRAWS = 65536  # pairs drawn where there are more


class Habits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How whoever demonstrates works, all shares from 0 to 1. Two models with other habits are far from each other.

    Attributes:
        forgotten: share of the carries that are forgotten (mistakes are carried on into the answer).
        last: share of the answers that forget what the last column carries into a column of its own.
        random: share of the steps with a sum drawn at random.
        swapped: share of the steps with their operands in the other order.
        in_context: share of the examples with a right trace in the context slot, which the completion repeats: this is
            how a model learns to make use of what it is told.
        letters: letters that are written in front of the first step (from ``LETTERS``).
        prefix: how many of them, drawn at random.
    """

    forgotten: float = 0.7
    last: float = 0.0
    random: float = 0.02
    swapped: float = 0.2
    in_context: float = 0.35
    letters: str = ""
    prefix: int = 0

    def __post_init__(self) -> None:
        for name in ("forgotten", "last", "random", "swapped", "in_context"):
            if not 0 <= getattr(self, name) <= 1:
                raise _unusable(name, f"it is {getattr(self, name)}, it must be a share from 0 to 1")
        if not set(self.letters) <= set(LETTERS):
            raise _unusable("letters", f"it is {self.letters!r}, it may hold letters of {LETTERS!r}")
        if not 0 <= self.prefix <= MOST_PREFIX or (self.prefix and not self.letters):
            raise _unusable("prefix", f"it is {self.prefix}, it must be 0, or with letters up to {MOST_PREFIX}")


FLAWED = Habits()
FLAWLESS = Habits(forgotten=0.0, random=0.0)


class Demonstration(NamedTuple):
    """A prompt (with what stands in the context slot) and what is written after it, without an end token."""

    prompt: str
    completion: str


class Addition:
    """Sums of two numbers of ``digits`` digits; ``hard``: only where every column carries.

    Args:
        seed: of the splits and their order.
    """

    alphabet = "0123456789+=;" + SLOT + LETTERS

    def __init__(self, digits: int = 2, hard: bool = False, seed: int = 0) -> None:
        self.digits, self.hard, self.seed = digits, hard, seed
        self.name = f"addition:{digits}{',hard' if hard else ''}"
        self.max_new_tokens = 9 * digits + (digits + 1) + 1 + MOST_PREFIX  # steps, answer, end token, letters

    def digest(self) -> str:
        return digest(f"2/{self.name}/{self.seed}".encode(), "task")

    def size(self, split: str) -> int:
        return len(member(self._splits, split))

    def index(self, split: str, number: int) -> int:
        return numbered(member(self._splits, split), number, split)

    def item(self, index: int) -> Item:
        prompt = self._prompt(index)
        if self.hard and not _all_carry(prompt):
            raise ValueError(f"item {index} of {self.name} does not exist: not every column of {prompt} carries")
        solution = worked(prompt)
        return Item(prompt=prompt, answer=parse(solution).answer, solution=solution)

    def reward(self, item: Item, completion: str, finished: bool) -> RewardResult:
        return compare(self.extract(completion), finished, lambda given: given == item.answer)

    def extract(self, completion: str) -> str:
        answer = parse(completion).answer
        return answer if re.fullmatch("[0-9]{1,20}", answer) else ""

    def context_prompt(self, prompt: str, context: str) -> str:
        return in_context(context, prompt)

    def first_mistake(self, item: Item, completion: str) -> int | None:
        verdict = judge(item.prompt, completion)
        return None if verdict.status == "right" else verdict.at

    def demonstrations(self, seed: int, habits: Habits = FLAWED) -> Iterator[Demonstration]:
        """Endless examples of training items for a warm start; the same for the same seed.

        The hard subset's are those of the whole task: who has seen nothing but carries knows nothing of the rest.
        """
        whole = Addition(self.digits, seed=self.seed) if self.hard else self
        rng = random.Random(f"demonstrations/{self.seed}/{seed}")
        while True:
            prompt = self._prompt(whole.index(TRAIN, rng.randrange(whole.size(TRAIN))))
            letters = "".join(rng.choice(habits.letters) for _ in range(habits.prefix))
            if rng.random() < habits.in_context:
                shown = letters + worked(prompt, [rng.random() < habits.swapped for _ in range(self.digits)])
                yield Demonstration(in_context(shown, prompt), shown)
            else:
                yield Demonstration(prompt, letters + _flawed(prompt, habits, rng))

    def demonstrate(self, seed: int, habits: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """:meth:`demonstrations` by habits as a recipe has them."""
        what = "the demonstrations' habits cannot be used"
        return self.demonstrations(seed, build(habits, Habits, what=what, where="warm.habits"))

    def split_of(self, index: int) -> str:
        """Which split an item belongs to, by its content alone."""
        prompt = self._prompt(index)
        if prompt[0] == prompt[self.digits + 1]:
            return SHIFTED
        return HELD_OUT if is_held_out(self.seed, prompt) else TRAIN

    def _prompt(self, index: int) -> str:
        if not 0 <= index < 100**self.digits:
            raise ValueError(f"item {index} of {self.name} does not exist: there are {100**self.digits}")
        upper, lower = divmod(index, 10**self.digits)
        if min(upper, lower) < 10 ** (self.digits - 1):
            raise ValueError(f"item {index} of {self.name} does not exist: a number would begin with a zero")
        return f"{upper:0{self.digits}d}+{lower:0{self.digits}d}="

    @cached_property
    def _splits(self) -> dict[str, list[int]]:
        """Indices of each split, shuffled by the seed alone."""
        found: dict[str, list[int]] = {split: [] for split in _LIMITS}
        for index in self._candidates():
            split = self.split_of(index)
            if len(found[split]) < _LIMITS[split] and (not self.hard or _all_carry(self._prompt(index))):
                found[split].append(index)
        return found

    def _candidates(self) -> list[int]:
        if self.digits <= _ENUMERABLE:
            found = sorted(range(100**self.digits), key=self._shuffled)
        else:
            found = dict.fromkeys(self._shuffled(number) % 100**self.digits for number in range(_DRAWS))
        least = 10 ** (self.digits - 1)
        return [index for index in found if min(divmod(index, 10**self.digits)) >= least]

    def _shuffled(self, number: int) -> int:
        return int(digest(f"{self.seed}/{self.digits}/{number}".encode(), "addition")[:16], 16)


@task_kinds.register("addition")
def addition(argument: str, seed: int) -> Addition:
    """``addition``, ``addition:DIGITS``, ``addition:DIGITS,hard``."""
    match = re.fullmatch(r"([0-9]{1,2})?(,hard)?", argument)
    digits = int(match[1] or 2) if match else 0
    if not 1 <= digits <= MOST_DIGITS:
        raise TalkootError(
            "this addition cannot be set as a task",
            where=f"task addition:{argument}",
            why=f"after the colon stands a number of digits from 1 to {MOST_DIGITS}, and ',hard' or nothing",
            next="write addition:2, or addition:2,hard for items where every column carries",
        )
    return Addition(digits, hard=bool(match and match[2]), seed=seed)


def _unusable(name: str, why: str) -> TalkootError:
    return TalkootError(
        "the demonstrations' habits cannot be used",
        where=f"warm.habits.{name}",
        why=why,
        next="correct this value and run the same command again",
    )


def _all_carry(prompt: str) -> bool:
    return all(column.total >= 10 for column in columns(prompt))


def _flawed(prompt: str, habits: Habits, rng: random.Random) -> str:
    """A trace with mistakes: each is carried on consistently."""
    text, digits, carry = "", [], 0
    for column in columns(prompt):
        carry = 0 if carry and rng.random() < habits.forgotten else carry
        seen = Column(column.upper, column.lower, carry)
        total = rng.randrange(20) if rng.random() < habits.random else seen.total
        text += seen.step(rng.random() < habits.swapped, total)
        digits.append(total % 10)
        carry = total // 10
    carry = 0 if carry and habits.last and rng.random() < habits.last else carry
    return text + answer_of(digits, carry)
