"""Problems of the reasoning-gym package (optional): ``reasoning-gym:DATASET`` or ``reasoning-gym:DATASET,KEY=VALUE``.

KEY and VALUE are the data set's own settings (``chain_sum,min_terms=2,max_terms=3``). An item is a function of (seed,
index); its reward is the package's own score. Data sets whose items differ between two processes, that name no right
answer, or whose scorer would *evaluate* a completion (a stranger's, that is) as program text are refused;
:data:`REFUSED` says which. There is no ``shifted`` split: evaluate the same data set with other settings.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import re
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from typing import Any

from talkoot.core.errors import TalkootError, nearest
from talkoot.core.ids import digest
from talkoot.tune.rewards import comparisons
from talkoot.tune.rewards.answer import answer_in
from talkoot.tune.rewards.result import RewardResult
from talkoot.tune.rewards.reward import refused
from talkoot.tune.tasks.splits import HELD_OUT, SHIFTED, TRAIN, is_held_out, member
from talkoot.tune.tasks.task import Item, task_kinds

_EVALUATES = "its scorer evaluates the completion as program text, which a stranger may have written"
_UNSTABLE = "its items differ between two processes with the same seed"
_GOLDLESS = "it names no right answer"
_SLOW = "an item takes too long to make (from 70 ms to seconds)"

# Found by running all of version 0.1.25 under two hash seeds, and by reading what scorers do with an answer.
REFUSED = {
    **dict.fromkeys(("binary_matrix", "countdown", "intermediate_integration", "n_queens", "puzzle24"), _EVALUATES),
    **dict.fromkeys(("simple_integration", "spiral_matrix", "string_insertion"), _EVALUATES),
    **dict.fromkeys(("isomorphic_strings", "knight_swap", "list_functions"), _UNSTABLE),
    **dict.fromkeys(("polynomial_multiplication", "ransom_note"), _UNSTABLE),
    **dict.fromkeys(("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"), _GOLDLESS),
    **dict.fromkeys(("acre", "futoshiki", "zebra_puzzles"), _SLOW),
    "composite": "it is a mixture: name one of its parts",
    "game_of_life_halting": "its scorer takes any text for right",
    "palindrome_partitioning": "its answers are longer than 4,000 characters",
    "word_ladder": "it has only a few items",
}
# Where the metadata's expression is the whole question (elsewhere it may be the answer).
_EXPRESSIONS = ("basic_arithmetic", "chain_sum", "decimal_chain_sum", "products")

_REWARD, _COMPARED = "reward", ("exact", "numeric")

TRAIN_ITEMS, HELD_OUT_ITEMS = 2**20, 1024
# Each number looks for a prompt of its split among a few indices of its own, so that no list of all prompts is needed.
_TRAIN_STRIDE, _HELD_OUT_STRIDE = 8, 256
_HELD_OUT_START = TRAIN_ITEMS * _TRAIN_STRIDE
_SIZE = _HELD_OUT_START + HELD_OUT_ITEMS * _HELD_OUT_STRIDE
_CACHED = 4096  # problems that are kept: a group's completions are rewarded one after another

_MAX_ANSWER = 4000  # characters
_HUGE = re.compile("[eE][-+]?[0-9_]{4}")  # an exponent that some scorers would write out, digit by digit
# What scorers raise at texts that they do not expect.
_UNREADABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class Gym:
    """One data set of reasoning-gym.

    Args:
        dataset: the package's object.
        version: of the package.
        settings: the data set's settings, as text.
        comparison: how answers are compared instead of by the data set's own scorer, by name; empty = by that.
    """

    alphabet = ""
    max_new_tokens = 0

    def __init__(self, kind: str, dataset: Any, version: str, settings: str, seed: int, comparison: str = "") -> None:
        self.name = f"reasoning-gym:{kind}" + (f",{settings}" if settings else "")
        self.seed, self._kind, self._dataset = seed, kind, dataset
        config = ",".join(f"{one.name}={getattr(dataset.config, one.name)!r}" for one in fields(dataset.config))
        self._comparison = comparisons[comparison] if comparison else None
        self._digest = digest(f"1/{version}/{kind}/{config}/{seed}/{comparison}".encode(), "task")
        self._entry: Callable[[int], dict[str, Any]] = lru_cache(_CACHED)(lambda index: dataset[index])

    def digest(self) -> str:
        return self._digest

    def size(self, split: str) -> int:
        return member({TRAIN: TRAIN_ITEMS, HELD_OUT: HELD_OUT_ITEMS, SHIFTED: 0}, split)

    def index(self, split: str, number: int) -> int:
        size, held_out = self.size(split), split == HELD_OUT
        if not size:
            raise ValueError(f"the split {split!r} of this task is empty")
        stride = _HELD_OUT_STRIDE if held_out else _TRAIN_STRIDE
        start = (_HELD_OUT_START if held_out else 0) + number % size * stride
        for index in range(start, start + stride):
            if is_held_out(self.seed, self._prompt(index)) == held_out:
                return index
        raise TalkootError(
            f"{self.name} has too few different problems",
            where=f"the split {split} of {self.name}",
            why=f"none of {stride} problems belongs to it",
            next="give the data set larger numbers, or choose another",
        )

    def item(self, index: int) -> Item:
        return Item(prompt=self._prompt(index), answer=self._entry(index)["answer"], facts={"index": index})

    def reward(self, item: Item, completion: str, finished: bool) -> RewardResult:
        given = self.extract(completion)
        if unusable := refused(given, finished):
            return unusable
        if self._comparison is not None:
            return self._comparison.reward(item.answer, given)
        if _HUGE.search(given):
            return RewardResult(0.0, "unreadable")
        try:
            score = float(self._dataset.score_answer(given, self._entry(item.facts["index"])))
        except _UNREADABLE:
            return RewardResult(0.0, "unreadable")
        if not math.isfinite(score):
            return RewardResult(0.0, "unreadable")
        score = min(max(score, 0.0), 1.0)
        return RewardResult(score, "right" if score == 1.0 else "partly right" if score > 0.1 else "wrong")

    def extract(self, completion: str) -> str:
        return self._comparison.extract(completion) if self._comparison else answer_in(completion, _MAX_ANSWER)

    def _prompt(self, index: int) -> str:
        if not 0 <= index < _SIZE:
            raise ValueError(f"item {index} of {self.name} does not exist: there are {_SIZE}")
        entry = self._entry(index)
        return f"{entry['metadata']['expression']}=" if self._kind in _EXPRESSIONS else entry["question"]


@task_kinds.register("reasoning-gym")
def gym(argument: str, seed: int) -> Gym:
    """``reasoning-gym:DATASET,KEY=VALUE,...``; ``reward=numeric`` (or ``exact``) compares answers in our own way, which
    takes the last number of a text for its answer where the package's scorers want the bare number."""
    kind, _, settings = argument.partition(",")
    try:
        factory = importlib.import_module("reasoning_gym.factory")
        importlib.import_module("reasoning_gym")  # registers the data sets
        version = importlib.metadata.version("reasoning-gym")
    except ImportError as error:
        raise TalkootError(
            "reasoning-gym is not installed",
            where=f"task reasoning-gym:{argument}",
            why=str(error),
            next="pip install 'talkoot[gym]'",
        ) from error
    if kind not in factory.DATASETS or kind in REFUSED:
        raise TalkootError(
            f"the data set {kind!r} of reasoning-gym cannot be a task"
            if kind in REFUSED
            else f"unknown data set {kind!r}",
            where=f"task reasoning-gym:{argument}",
            why=REFUSED.get(kind) or nearest(kind, set(factory.DATASETS) - set(REFUSED)),
            next="choose another data set of reasoning-gym, such as chain_sum",
        )
    wanted = _settings(argument, settings, {_REWARD, *(one.name for one in fields(factory.DATASETS[kind][1]))})
    comparison = str(wanted.pop(_REWARD, ""))
    if comparison and comparison not in _COMPARED:
        raise _misfit(argument, f"answers cannot be compared by {comparison!r}; {nearest(comparison, _COMPARED)}")
    try:
        dataset = factory.create_dataset(kind, **wanted, seed=seed, size=_SIZE)
    except (AssertionError, TypeError, ValueError) as error:
        raise _misfit(argument, str(error) or "the data set refuses this combination") from error
    return Gym(kind, dataset, version, settings, seed, comparison)


def _settings(argument: str, text: str, known: set[str]) -> dict[str, Any]:
    """``a=1,b=0.5,c=word`` as a mapping of the data set's own settings."""
    found: dict[str, Any] = {}
    for piece in text.split(",") if text else ():
        key, equals, value = piece.partition("=")
        if not equals or key not in known - {"seed", "size"}:
            raise _misfit(argument, f"{piece!r} sets nothing; {nearest(key, known - {'seed', 'size'})}")
        found[key] = _plain(value)
    return found


def _plain(value: str) -> bool | int | float | str:
    if value in ("true", "false"):
        return value == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _misfit(argument: str, why: str) -> TalkootError:
    return TalkootError(
        "a data set of reasoning-gym cannot be set up like this",
        where=f"task reasoning-gym:{argument}",
        why=why,
        next="write DATASET,KEY=VALUE,... with the data set's own settings, such as chain_sum,max_terms=3",
    )
