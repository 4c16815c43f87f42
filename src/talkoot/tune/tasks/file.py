"""Problems from a file of JSON lines: ``prompt``, ``answer``, and if wanted ``solution``, ``reward`` and ``split``.

``jsonl:PATH`` or ``jsonl:PATH,KIND``, where KIND is how answers are compared (``exact`` unless it is said: ``numeric``,
``regex``, ``code``); a line's own ``reward`` comes first. One prompt in ten is held out, by a hash of its text; a
line's ``split`` (``train``, ``held_out``, ``shifted``) comes first. Everybody who trains on the file needs the same
bytes: the digest covers them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import msgspec

from talkoot.core.errors import TalkootError
from talkoot.core.ids import digest
from talkoot.tune.rewards import comparisons
from talkoot.tune.rewards.result import RewardResult
from talkoot.tune.rewards.reward import refused
from talkoot.tune.tasks.splits import HELD_OUT, SHIFTED, SPLITS, TRAIN, is_held_out, member, numbered
from talkoot.tune.tasks.task import Item, task_kinds

MAX_FILE_BYTES = 256 * 2**20
MAX_LINE_BYTES = 256 * 2**10


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """One problem, as the file has it."""

    prompt: str
    answer: str | int | float
    solution: str = ""
    reward: str = ""
    split: str = ""


class File:
    """The problems of a file, in its order.

    Args:
        argument: how a recipe names the file.
        lines: the problems, by their numbers in the file.
        content: digest of the file's bytes.
        kind: of the comparison, for lines that name none.
        seed: of the splits.
    """

    alphabet = ""
    max_new_tokens = 0

    def __init__(self, argument: str, lines: dict[int, Line], content: str, kind: str, seed: int) -> None:
        self.name, self._path, self._kind = f"jsonl:{argument}", argument.removesuffix(f",{kind}"), kind
        self._lines, self._numbers = list(lines.values()), list(lines)
        self._digest = digest(f"1/{content}/{kind}/{seed}".encode(), "task")
        self._splits: dict[str, list[int]] = {split: [] for split in SPLITS}
        for index, line in enumerate(self._lines):
            split = line.split or (HELD_OUT if is_held_out(seed, line.prompt) else TRAIN)
            self._splits[split].append(index)

    def digest(self) -> str:
        return self._digest

    def size(self, split: str) -> int:
        return len(member(self._splits, split))

    def index(self, split: str, number: int) -> int:
        return numbered(member(self._splits, split), number, split)

    def place(self, index: int) -> str:
        return f"{self._path}:{self._numbers[index]}"

    def item(self, index: int) -> Item:
        if not 0 <= index < len(self._lines):
            raise ValueError(f"item {index} of {self.name} does not exist: there are {len(self._lines)}")
        line = self._lines[index]
        facts = {"reward": line.reward or self._kind}
        return Item(prompt=line.prompt, answer=str(line.answer), solution=line.solution, facts=facts)

    def reward(self, item: Item, completion: str, finished: bool) -> RewardResult:
        comparison = comparisons[item.facts["reward"]]
        given = comparison.extract(completion)
        return refused(given, finished) or comparison.reward(item.answer, given)

    def extract(self, completion: str) -> str:
        return comparisons[self._kind].extract(completion)


@task_kinds.register("jsonl")
def jsonl(argument: str, seed: int) -> File:
    """``jsonl:PATH`` or ``jsonl:PATH,KIND``."""
    path, comma, kind = argument.rpartition(",")
    if not comma or kind not in set(comparisons):
        path, kind = argument, "exact"
    data = _read(path)
    lines: dict[int, Line] = {}
    known: dict[str, str] = {}
    for number, text in enumerate(data.split(b"\n"), 1):
        if text.strip():
            last = lines[number] = _line(path, number, text, kind)
            if known.setdefault(last.prompt, last.split) != last.split:
                _refuse(path, number, f"its prompt stands in another split too: {last.prompt[:60]!r}")
    if not lines:
        _refuse(path, 1, "the file has no problem in it")
    return File(argument, lines, digest(data, "task file"), kind, seed)


def _read(path: str) -> bytes:
    file = Path(path).expanduser()
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TalkootError(
            "the file of problems cannot be read",
            where=path or "task jsonl:",
            why=str(error.strerror or error),
            next="name a file of JSON lines: jsonl:problems.jsonl",
        ) from error
    if len(data) > MAX_FILE_BYTES:
        _refuse(path, 1, f"the file has more than {MAX_FILE_BYTES} bytes")
    return data


def _line(path: str, number: int, text: bytes, kind: str) -> Line:
    if len(text) > MAX_LINE_BYTES:
        _refuse(path, number, f"it has more than {MAX_LINE_BYTES} bytes")
    try:
        line = msgspec.json.decode(text, type=Line)
        if not line.prompt:
            raise ValueError("its prompt is empty")
        if line.split and line.split not in SPLITS:
            raise ValueError(f"its split is {line.split!r}, it must be one of {', '.join(SPLITS)}")
        if line.reward and line.reward not in set(comparisons):
            raise ValueError(f"its reward is {line.reward!r}, it must be one of {', '.join(comparisons)}")
        comparisons[line.reward or kind].check(str(line.answer))
    except ValueError as error:  # msgspec's errors are ValueErrors too
        _refuse(path, number, str(error))
    return line


def _refuse(path: str, number: int, why: str) -> NoReturn:
    raise TalkootError(
        "the file of problems is not usable",
        where=f"{path}:{number}",
        why=why,
        next=f'write one problem a line, like {{"prompt": "2+2=", "answer": "4"}}; splits are {TRAIN}, {HELD_OUT}, '
        f"{SHIFTED}",
    )
