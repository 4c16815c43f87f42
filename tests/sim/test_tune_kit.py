"""What the tests of post-training runs in virtual time share: small recipes, and runs whose log can be asked."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, TypeVar

from talkoot.core.fold import Entry, State
from talkoot.core.plain import build
from talkoot.tune.recipe import TuneRecipe
from talkoot.tune.records import Updated
from talkoot.tune.run import TuneResult, run_simulated

T = TypeVar("T")

LINES = [json.dumps({"prompt": f"{n:02d}=", "answer": "[0-9]*[0-4]"}) for n in range(60)]
FOLDER = tempfile.TemporaryDirectory()  # gone with the test's process
FILE = Path(FOLDER.name) / "luck.jsonl"  # a third of what an untrained policy says is right
FILE.write_text("\n".join(LINES))

SMALL = {
    "task": f"jsonl:{FILE},regex",
    "seed": 3,
    "model": {"width": 16, "layers": 1, "heads": 2, "context": 64, "tokenizer": "characters:0123456789="},
    "rollout": {"prompts": 3, "samples": 6, "max_new_tokens": 12},
    "tune": {"rounds": 4, "evaluate_every": 0, "checkpoint_every": 2},
    "optimizer": {"learning_rate": 1e-3},
    "peers": [{"name": "alder"}, {"name": "birch", "model": {"width": 8, "seed": 2}}],
}


def recipe(**sections: Any) -> TuneRecipe:
    """The small recipe, with tables merged over its own and anything else replaced."""
    tree = dict(SMALL)
    for key, value in sections.items():
        tree[key] = {**tree.get(key, {}), **value} if isinstance(value, dict) else value
    return build(tree, TuneRecipe, what="the test's recipe", where="here")


class Run:
    """A finished run and its log."""

    def __init__(self, result: TuneResult, entries: list[Entry], state: State) -> None:
        self.result, self.entries, self.state = result, entries, state
        self.tuned = state["tune"]

    def facts(self, op: str, kind: type[T]) -> list[T]:
        """Bodies of all receipts of an operation."""
        return [entry.receipt.read(kind) for entry in self.entries if entry.receipt.op == op]

    def updates(self, name: str) -> list[Updated]:
        """What a peer (in all its lives) said of its rounds."""
        names = self.tuned.names
        found = [e.receipt for e in self.entries if e.receipt.op == "tune.update"]
        return [receipt.read(Updated) for receipt in found if names[receipt.peer] == name]

    @property
    def hashes(self) -> dict[str, str]:
        """Weights at the end, by peer."""
        return {name: peer.policy for name, peer in self.tuned.peers.items()}

    @property
    def rejected(self) -> Counter[str]:
        """Everything that was refused, by reason, over all peers."""
        total: Counter[str] = Counter()
        for peer in self.tuned.peers.values():
            total.update(peer.rejected)
        return total


def run(which: TuneRecipe, folder: Path | None = None, stop_after: int | None = None) -> Run:
    """Run in virtual time; ``stop_after``: the lead is asked to stop when somebody has done so many rounds."""
    entries: list[Entry] = []
    states = [State()]
    leads: list[Any] = []

    def observe(entry: Entry, state: State) -> None:
        entries.append(entry)
        states[0] = state
        if stop_after is not None and state["tune"].furthest >= stop_after:
            leads[0].stop_requested = True

    result = run_simulated(which, folder, observe, leads.append)
    return Run(result, entries, states[0])
