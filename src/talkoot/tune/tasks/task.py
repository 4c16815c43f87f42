"""Tasks with verifiable answers, by name: who knows a task's name builds the same items from their indices."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any, Protocol, runtime_checkable

import msgspec

from talkoot.core.errors import TalkootError
from talkoot.core.registry import Registry
from talkoot.tune.rewards.result import RewardResult


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One problem.

    Attributes:
        prompt: what the policy reads (a plain text; a policy with a chat template wraps it).
        answer: what is right, in the task's own form.
        solution: a worked solution in the form of a completion, where the task has one (for warm starts and as context
            of a self-teacher); ends without an end token.
        facts: whatever else the task's reward needs.
    """

    prompt: str
    answer: str
    solution: str = ""
    facts: dict[str, Any] = {}


class Task(Protocol):
    """A stream of problems with a reward. Pure and deterministic: an index gives the same item on every machine.

    Attributes:
        name: how recipes call it, with its parameters (``addition:2``, ``reasoning-gym:chain_sum``).
        alphabet: every character that prompts and solutions use, for a new model's tokenizer; empty = any text.
        max_new_tokens: enough for a right answer in a tokenizer of one character per token; 0 = unknown.
    """

    name: str
    alphabet: str
    max_new_tokens: int

    def digest(self) -> str:
        """Names the definition, parameters and data included: equal digests mean equal items and rewards."""
        ...

    def size(self, split: str) -> int:
        """How many items the split has: ``train``, ``held_out`` or ``shifted`` (out of distribution; 0 = none)."""
        ...

    def index(self, split: str, number: int) -> int:
        """Index of the split's item ``number`` (taken modulo its size). No index belongs to two splits."""
        ...

    def item(self, index: int) -> Item:
        """The problem with this index; ValueError when there is none."""
        ...

    def reward(self, item: Item, completion: str, finished: bool) -> RewardResult:
        """What a completion's text earns. ``finished``: it was not cut off."""
        ...

    def extract(self, completion: str) -> str:
        """The answer a completion gives, in a canonical form (for majority votes); empty = none."""
        ...


@runtime_checkable
class TakesHints(Protocol):
    """What a task may have beside: how a policy is told something, and where a completion goes wrong."""

    def context_prompt(self, prompt: str, context: str) -> str:
        """The prompt with a text beside it that helps (feedback, a worked solution), in a form that models know."""
        ...

    def first_mistake(self, item: Item, completion: str) -> int | None:
        """The first wrong character; the text's length where it should go on; None where nothing is wrong or known."""
        ...


@runtime_checkable
class Listed(Protocol):
    """What a task may have beside: problems that somebody wrote down, so that any of them may be unlike the others."""

    def place(self, index: int) -> str:
        """Where the problem with this index stands, for messages."""
        ...


@runtime_checkable
class Demonstrates(Protocol):
    """What a task may have beside: examples for warm starts that are not simply its solutions."""

    def demonstrate(self, seed: int, habits: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Endless pairs of prompt and completion; ``habits``: the task's own settings for them, as a recipe has them.

        Raises:
            TalkootError: an unknown habit, or one out of range.
        """
        ...


def demonstrations(task: Task) -> Iterator[tuple[str, str]]:
    """Training items with their worked solutions, over and over.

    Raises:
        TalkootError: the task has none.
    """
    for number in count():
        item = task.item(task.index("train", number))
        if not item.solution:
            raise TalkootError(
                "a policy cannot be warmed up on this task",
                where=f"warm.steps, task {task.name}",
                why="its problems come without worked solutions",
                next="set warm.steps = 0 and start from a model that can answer (model.load)",
            )
        yield item.prompt, item.solution


class TaskKind(Protocol):
    """Opens tasks of one kind; ``argument`` is what follows the colon in a task's name."""

    def __call__(self, argument: str, seed: int) -> Task: ...


task_kinds: Registry[TaskKind] = Registry("task")


def open_task(name: str, seed: int = 0) -> Task:
    """The task of this name (``KIND`` or ``KIND:ARGUMENT``).

    Args:
        seed: of the items' content and of the splits.

    Raises:
        TalkootError: there is no such kind, or the kind refuses its argument.
    """
    kind, _, argument = name.partition(":")
    return task_kinds[kind](argument, seed)
