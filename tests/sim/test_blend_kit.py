"""What the tests of experts' training share: three small domains, a recipe, and runs in virtual time."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from talkoot.blend.recipe import BlendRecipe
from talkoot.blend.train.run import BlendResult, train_experts
from talkoot.core.fold import Entry, State
from talkoot.core.plain import build

FOLDER = tempfile.TemporaryDirectory()  # gone with the test's process
WORDS = {"sums": "one two three four five six seven", "birds": "heron wren finch robin owl", "tools": "saw adze plane"}
for _name, _words in WORDS.items():
    _parts = _words.split()
    _rows = [" ".join(_parts[(i * j) % len(_parts)] for j in range(1, 40)) + f" {i}" for i in range(120)]
    (Path(FOLDER.name) / f"{_name}.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in _rows))


def source(name: str) -> str:
    return str(Path(FOLDER.name) / f"{name}.jsonl")


def recipe(**sections: Any) -> BlendRecipe:
    tree: dict[str, Any] = {
        "seed": 3,
        "model": {"layers": 1, "width": 16, "heads": 2, "hidden": 32, "context": 32, "tokenizer": "bytes"},
        "general": {"sources": [source("sums")], "steps": 6},
        "experts": {"steps": 12, "batch": 2, "checkpoint_every": 4, "trial_steps": 4, "warmup": 2},
        "domains": [{"name": name, "source": source(name), "difficulty": "medium"} for name in WORDS],
    }
    for key, value in sections.items():
        tree[key] = {**tree.get(key, {}), **value} if isinstance(value, dict) else value
    return build(tree, BlendRecipe, what="the test's recipe", where="here")


def run(which: BlendRecipe, folder: Path, stop_after: int = 0) -> tuple[BlendResult, list[Entry]]:
    """Run in virtual time; ``stop_after``: the lead is asked to stop after so many entries."""
    entries: list[Entry] = []
    leads: list[Any] = []

    def observe(entry: Entry, state: State) -> None:
        entries.append(entry)
        if stop_after and len(entries) >= stop_after:
            leads[0].stop_requested = True

    return train_experts(which, folder, simulated=True, observer=observe, started=leads.append), entries


def weights(folder: Path) -> dict[str, bytes]:
    return {name: (folder / "experts" / name / "model.safetensors").read_bytes() for name in WORDS}
