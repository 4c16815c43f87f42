"""Two specialists that need no download: plays and Python code, from text that is on every machine."""

from __future__ import annotations

from typing import Any


def two_experts() -> dict[str, Any]:
    """A recipe of experts as plain data, for who gives none: some two minutes on two cores."""
    return {
        "name": "two-experts",
        "seed": 1,
        "model": {"layers": 3, "width": 64, "heads": 2, "hidden": 256, "context": 128, "tokenizer": "bpe:1024"},
        "general": {"sources": ["bundled:shakespeare"], "megabytes": 0.5, "domains": True, "steps": 200},
        "experts": {"steps": 150, "checkpoint_every": 50},
        "domains": [
            {"name": "plays", "source": "bundled:shakespeare", "difficulty": "medium"},
            {"name": "python", "source": "corpus:python", "megabytes": 1.0, "difficulty": "medium"},
        ],
    }
