"""What the tests with real processes share: a tiny job, the command line as a subprocess, waiting with deadlines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from talkoot.core.errors import TalkootError
from talkoot.core.fold import Entry, State
from talkoot.core.log import Log
from talkoot.run.folder import LOG
from talkoot.train.loop import Result
from talkoot.train.recipe import Data, Model, Recipe, Swarm, Train
from talkoot.train.records import Committed
from talkoot.train.run import run_real, run_simulated
from talkoot.world.faults import Fault

DEADLINE = 80.0  # generous: the machine is shared; a hang must still fail


def write_text(folder: Path, size: int = 20_000) -> Path:
    """A small text file of real words."""
    import importlib.resources

    text = importlib.resources.files("talkoot.data").joinpath("text", "shakespeare.txt").read_bytes()[:size]
    path = folder / "text.txt"
    path.write_bytes(text)
    return path


def tiny(
    text: Path,
    *,
    steps: int = 8,
    depth: int = 1,
    tokenizer: str = "bytes",
    swarm: Swarm | None = None,
    faults: tuple[Fault, ...] = (),
    **train: Any,
) -> Recipe:
    """A job of a second: context 32, four microbatches of two rows."""
    settings = {"microbatches": 4, "microbatch_size": 2, "warmup": 2, "checkpoint_every": 4, "evaluate_every": 0}
    return Recipe(
        name="tiny",
        seed=3,
        data=Data(source=str(text), tokenizer=tokenizer),
        model=Model(depth=depth, context=32),
        train=Train(steps=steps, evaluate_batches=2, **{**settings, **train}),
        swarm=swarm or Swarm(stages=2, replicas=2),
        faults=faults,
    )


@dataclass
class Ran:
    """A finished run: its result, and everything its log received while it ran."""

    result: Result
    entries: list[Entry] = field(default_factory=list)

    @property
    def losses(self) -> dict[int, tuple[float, ...]]:
        """Each microbatch's loss, of the commits that stand, by step."""
        return standing_losses(self.entries)

    def receipts(self, op: str) -> list[Any]:
        """All receipts of one kind."""
        return [entry.receipt for entry in self.entries if entry.receipt.op == op]


def standing_losses(entries: list[Entry]) -> dict[int, tuple[float, ...]]:
    """Losses by step; a step that was done again counts as it was done last."""
    return {e.receipt.step: e.receipt.read(Committed).losses for e in entries if e.receipt.op == "train.commit"}


def execute(
    recipe: Recipe,
    folder: Path,
    *,
    sim: bool = False,
    observe: Callable[[Any, Entry], None] = lambda lead, entry: None,
) -> Ran:
    """Run in this process (with peers of its own, unless simulated); ``observe`` sees the lead and each new entry."""
    entries: list[Entry] = []
    leads: list[Any] = []

    def watch(entry: Entry, state: State) -> None:
        entries.append(entry)
        observe(leads[0] if leads else None, entry)

    result = (run_simulated if sim else run_real)(recipe, folder, watch, leads.append)
    return Ran(result, entries)


def to_toml(recipe: Recipe, path: Path) -> Path:
    """The recipe as the file that a user would write."""
    lines: list[str] = []
    tree = msgspec.to_builtins(recipe)
    faults = tree.pop("faults")
    plain = {key: value for key, value in tree.items() if not isinstance(value, dict)}
    lines += [f"{key} = {json.dumps(value)}" for key, value in plain.items()]
    for section in ("data", "model", "train", "mixing", "swarm"):
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in tree[section].items() if value is not None]
    for fault in faults:
        lines.append("[[faults]]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in fault.items() if value is not None]
    path.write_text("\n".join(lines) + "\n")
    return path


def command(*arguments: object) -> list[str]:
    """The command line of ``talkoot ARGUMENTS`` in this very interpreter."""
    return [sys.executable, "-m", "talkoot", *map(str, arguments)]


def talkoot(*arguments: object, env: dict[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env={**os.environ, **(env or {})},
        **options,
    )


def start(*arguments: object, folder: Path) -> subprocess.Popen[bytes]:
    """Start the command line; what it says goes to ``folder/said.txt``."""
    with (folder / "said.txt").open("ab") as said:
        return subprocess.Popen(command(*arguments), stdout=said, stderr=said, stdin=subprocess.DEVNULL)


def read_log(folder: Path) -> list[Entry]:
    """All entries that a run's log holds now; none while it is being made."""
    try:
        log = Log(folder / LOG, readonly=True)
    except TalkootError:
        return []
    try:
        return list(log.entries())
    finally:
        log.close()


def commits(folder: Path) -> int:
    """How many commits the log holds."""
    return sum(entry.receipt.op == "train.commit" for entry in read_log(folder))


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes] | None = None) -> None:
    """Wait until ``condition`` holds; fail at the deadline, or when ``process`` ends without it."""
    until = time.monotonic() + DEADLINE
    pause = subprocess.Popen(["sleep", "600"])
    try:
        while not condition():
            assert time.monotonic() < until, "nothing came of it in time"
            if process is not None:
                assert process.poll() is None or condition(), f"the process ended with {process.returncode}"
            try:
                pause.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
    finally:
        pause.kill()
        pause.wait()


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def descendants(pid: int) -> set[int]:
    """Process ids of everything that descends from ``pid``."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text()
        except OSError:
            continue
        parents[int(entry.parent.name)] = int(fields.rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that a test started, whatever state it is in."""
    if process.poll() is None:
        process.kill()
    process.wait(DEADLINE)
